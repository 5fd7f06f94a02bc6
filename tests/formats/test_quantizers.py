import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.core import ExpertShape, FormatError, OptionError
from dynaexq.formats import QUANTIZERS, ExpertFormat, ExpertWeights, decode, encode, tier_format
from dynaexq.formats.quantizers import dequantize, quantize_matrix

QUANTISED = ["int1", "int2", "int3", "int4", "int8"]
formats = st.builds(tier_format, st.sampled_from(QUANTISED), st.sampled_from([32, 64, 128]))


def gaussian(shape: ExpertShape, seed: int = 0, spread: float = 0.02) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(shape.intermediate, shape.hidden)] * 2 + [(shape.hidden, shape.intermediate)]
    return ExpertWeights(*(torch.randn(size, generator=generator) * spread for size in sizes))


def group_errors(matrix: torch.Tensor, fmt: ExpertFormat, quantizer: str) -> torch.Tensor:
    codes = quantize_matrix(matrix, fmt, quantizer)
    grouped = codes._replace(codes=codes.codes.reshape(len(matrix), -1, fmt.group_size))
    return (matrix.reshape(grouped.codes.shape) - dequantize(grouped, fmt)).square().sum(-1)


@given(formats, st.integers(0, 1 << 30), st.sampled_from([1e-4, 0.02, 3.0]))
def test_least_squares_is_never_worse_than_rounding_in_any_group(fmt: ExpertFormat, seed: int, spread: float) -> None:
    matrix = gaussian(ExpertShape(128, 128), seed, spread).gate
    assert (group_errors(matrix, fmt, "als") <= group_errors(matrix, fmt, "rtn")).all()


@pytest.mark.parametrize(("tier", "rtn", "als", "gain"), [("int2", 0.450, 0.325, 0.335), ("int4", 0.090, 0.084, 0.084)])
def test_weight_errors_on_gaussian_weights(tier: str, rtn: float, als: float, gain: float) -> None:
    shape = ExpertShape(512, 256)
    for quantizer, expected in (("rtn", rtn), ("als", als), ("als-gain", gain)):
        error = encode(gaussian(shape), tier_format(tier, 64), shape, quantizer).error
        assert error == pytest.approx(expected, rel=0.01)


@given(formats, st.sampled_from(sorted(QUANTIZERS)), st.integers(0, 1 << 30))
def test_recorded_error_is_the_error_of_the_decoded_bytes(fmt: ExpertFormat, quantizer: str, seed: int) -> None:
    shape = ExpertShape(128, 128)
    weights = gaussian(shape, seed)
    version = encode(weights, fmt, shape, quantizer)
    found = decode(version.block, fmt, shape)
    lost = sum(float((a - b).square().sum()) for a, b in zip(weights, found, strict=True))
    total = sum(float(a.square().sum()) for a in weights)
    assert version.error == pytest.approx((lost / total) ** 0.5, rel=1e-5)


@pytest.mark.parametrize("tier", QUANTISED)
@pytest.mark.parametrize("quantizer", sorted(QUANTIZERS))
@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_constant_groups_come_back_as_they_were(tier: str, quantizer: str, value: float) -> None:
    shape = ExpertShape(64, 64)
    weights = ExpertWeights(*(torch.full((64, 64), value) for _ in range(3)))
    found = decode(encode(weights, tier_format(tier, 64), shape, quantizer).block, tier_format(tier, 64), shape)
    assert all(torch.allclose(matrix, torch.full((64, 64), value), rtol=1e-3) for matrix in found)


@pytest.mark.parametrize("tier", ["int1", "int2", "int4"])
def test_gain_restores_most_of_what_least_squares_shrank(tier: str) -> None:
    shape, fmt = ExpertShape(512, 256), tier_format(tier, 64)
    weights = gaussian(shape)

    def overlap(quantizer: str) -> float:
        found = decode(encode(weights, fmt, shape, quantizer).block, fmt, shape).gate
        return float((found * weights.gate).sum() / weights.gate.square().sum())

    shrunk, restored = 1 - overlap("als"), 1 - overlap("als-gain")
    assert 0 < restored < 0.4 * shrunk


def test_int8_codes_never_use_minus_128() -> None:
    fmt = tier_format("int8", 32)
    codes = quantize_matrix(gaussian(ExpertShape(128, 128)).gate, fmt, "als").codes.view(torch.int8)
    assert int(codes.min()) >= -127


def test_bf16_is_exact_for_bf16_weights() -> None:
    shape = ExpertShape(64, 32)
    weights = ExpertWeights(*(matrix.to(torch.bfloat16) for matrix in gaussian(shape)))
    version = encode(weights, tier_format("bf16"), shape, "als")
    assert version.error == 0.0
    found = decode(version.block, tier_format("bf16"), shape)
    assert all(torch.equal(a, b.to(torch.float32)) for a, b in zip(found, weights, strict=True))


def test_what_a_scale_cannot_describe_is_refused() -> None:
    with pytest.raises(FormatError, match="above 65504"):
        quantize_matrix(torch.full((8, 64), 1e5), tier_format("int4"), "rtn")
    with pytest.raises(OptionError, match="unknown quantizer 'gptq'; known quantizers are rtn, hqq, als, als-gain"):
        quantize_matrix(torch.zeros((8, 64)), tier_format("int4"), "gptq")
