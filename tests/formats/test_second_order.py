"""The calibrated quantiser: it loses less on the inputs it was fitted to, and the bytes say what was measured."""

from __future__ import annotations

import pytest
import torch

from dynaexq.core import ExpertShape
from dynaexq.formats import ExpertWeights, VersionLayout, decode, encode, tier_format
from dynaexq.formats.codec import Base, ExpertMetrics, encode_nested
from dynaexq.formats.quantizers import CALIBRATED
from dynaexq.formats.second_order import Metric

SHAPE = ExpertShape(128, 64)


def weights(seed: int = 0) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(SHAPE.intermediate, SHAPE.hidden)] * 2 + [(SHAPE.hidden, SHAPE.intermediate)]
    return ExpertWeights(*(torch.randn(size, generator=generator) * 0.02 for size in sizes))


def moment(columns: int, seed: int = 1) -> torch.Tensor:
    """Of inputs that are strongly correlated, as activations are."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * torch.linspace(0.02, 1, columns).square()
    inputs = torch.randn(1000, columns, generator=generator) @ mixing.t()
    return inputs.t() @ inputs / len(inputs)


def metrics() -> ExpertMetrics:
    outer = Metric(moment(SHAPE.hidden))
    return ExpertMetrics(outer, outer, Metric(moment(SHAPE.intermediate)))


def loss(exact: ExpertWeights, found: ExpertWeights) -> float:
    """Relative error of the outputs of all three matrices, on inputs of these moments."""
    lost = total = 0.0
    for a, b, columns in zip(exact, found, (SHAPE.hidden, SHAPE.hidden, SHAPE.intermediate), strict=True):
        hessian = moment(columns)
        lost += float(((a - b) @ hessian * (a - b)).sum())
        total += float((a @ hessian * a).sum())
    return (lost / total) ** 0.5


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("tier", ["int2", "int3", "int4"])
def test_outputs_lose_much_less_than_without_calibration(tier: str, group: int) -> None:
    fmt, exact = tier_format(tier, group), weights()
    plain = decode(encode(exact, fmt, SHAPE, "als").block, fmt, SHAPE)
    fitted = decode(encode(exact, fmt, SHAPE, CALIBRATED, metrics()).block, fmt, SHAPE)
    assert loss(exact, fitted) < 0.6 * loss(exact, plain)


def test_eight_bits_and_bf16_need_no_calibration() -> None:
    for tier in ("int8", "bf16"):
        fmt = tier_format(tier, 64)
        fitted = encode(weights(), fmt, SHAPE, CALIBRATED, metrics()).block
        assert torch.equal(fitted, encode(weights(), fmt, SHAPE, "als").block)


def test_without_inputs_weights_are_fitted_themselves() -> None:
    even = ExpertMetrics(*(Metric(torch.eye(columns)) for columns in (128, 128, 64)))
    fmt = tier_format("int2", 64)
    assert encode(weights(), fmt, SHAPE, CALIBRATED, even).error < 1.01 * encode(weights(), fmt, SHAPE, "als").error


@pytest.mark.parametrize("tier", ["int2", "int3", "int4"])
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_constant_matrices_come_back(tier: str, value: float) -> None:
    exact = ExpertWeights(*(torch.full_like(each, value) for each in weights()))
    fmt = tier_format(tier, 64)
    found = decode(encode(exact, fmt, SHAPE, CALIBRATED, metrics()).block, fmt, SHAPE)
    for matrix in found:
        assert torch.allclose(matrix, torch.full_like(matrix, value), rtol=5e-3, atol=1e-6)


def test_inputs_that_never_come_change_nothing_and_break_nothing() -> None:
    dead = moment(SHAPE.hidden)
    dead[5, :] = dead[:, 5] = 0
    outer = Metric(dead)
    found = encode(weights(), tier_format("int2", 64), SHAPE, CALIBRATED, metrics()._replace(gate=outer, up=outer))
    assert 0 < found.error < 1


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(("tier", "nested", "gain"), [("int4", "int4+4", 0.3), ("int2", "int2+2", 0.7)])
def test_what_is_nested_refines_the_base_and_leaves_it_alone(tier: str, nested: str, gain: float, group: int) -> None:
    exact, low, high = weights(), tier_format(tier, group), tier_format(nested, group)
    base = encode(exact, low, SHAPE, CALIBRATED, metrics()).block
    before = base.clone()
    version = encode_nested(exact, Base(base, low), high, SHAPE, metrics())
    assert torch.equal(base, before)
    assert version.block.numel() == VersionLayout.of(high, SHAPE).extent_bytes
    found = decode(version.block, high, SHAPE, Base(base, low))
    assert loss(exact, found) < gain * loss(exact, decode(base, low, SHAPE))
    lost = sum(float((a - b).square().sum()) for a, b in zip(exact, found, strict=True))
    total = sum(float(each.square().sum()) for each in exact)
    assert version.error == pytest.approx((lost / total) ** 0.5, rel=1e-5)


def test_four_and_four_bits_come_near_eight() -> None:
    exact, low, high = weights(), tier_format("int4", 64), tier_format("int4+4", 64)
    base = encode(exact, low, SHAPE, CALIBRATED, metrics()).block
    found = decode(encode_nested(exact, Base(base, low), high, SHAPE, metrics()).block, high, SHAPE, Base(base, low))
    direct = decode(encode(exact, tier_format("int8", 64), SHAPE, "als").block, tier_format("int8", 64), SHAPE)
    assert loss(exact, found) < 2.2 * loss(exact, direct)


@pytest.mark.parametrize(("tier", "above", "below"), [("int2d4", "int2", "int4"), ("int4d8", "int4", "int8")])
@pytest.mark.parametrize("fitted", [False, True])
def test_an_uneven_version_is_made_of_those_of_two_tiers(tier: str, above: str, below: str, fitted: bool) -> None:
    quantizer, known = (CALIBRATED, metrics()) if fitted else ("als-gain", None)

    def version(name: str) -> ExpertWeights:
        fmt = tier_format(name, 64)
        return decode(encode(weights(), fmt, SHAPE, quantizer, known).block, fmt, SHAPE)

    found, first, second = version(tier), version(above), version(below)
    for part, expected in zip(found, (first.gate, first.up, second.down), strict=True):
        assert torch.equal(part, expected)
