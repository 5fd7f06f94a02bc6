"""The native kernel against the reference: every format and mode, every batch and number of threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from dynaexq.core import ExpertShape, ModelShape, encode_handle
from dynaexq.device import CpuDevice
from dynaexq.formats import ExpertWeights, encode, tier_format
from dynaexq.formats.base import base_tier
from dynaexq.formats.codec import Base, decode, encode_nested
from dynaexq.kernels import ExpertsCall, LayerFunctions, make_kernel
from dynaexq.kernels.gates import GateFunction
from dynaexq.kernels.native import NativeKernel
from dynaexq.native import instruction_sets
from dynaexq.residency.arena import ExpertArena

SHAPE = ModelShape(1, 6, ExpertShape(256, 384))
TOP_K = 3
SWIGLU, CLAMPED = GateFunction(), GateFunction(True, 1.702, 7.0)
TIERS = ("int1", "int2", "int3", "int4", "int8", "bf16")
MIXED = ("int2+2", "int4", "int4+4", "int3", "bf16", "int2")
UNEVEN = ("int2d3", "int4d8", "int3d4", "int2d4", "int2", "bf16")
BOUNDS = {
    "int1": 0.03,
    "int2": 0.03,
    "int3": 0.03,
    "int4": 0.03,
    "int2+2": 0.03,
    "int8": 3e-4,
    "int4+4": 3e-4,
    "int2d3": 0.03,
    "int2d4": 0.03,
    "int3d4": 0.03,
    "int4d8": 0.03,
    "bf16": 1e-5,
}
"""Relative error of rounded activations: 8 bits cost 1 to 2 %, 16 bits almost nothing, bf16 weights meet float32."""


class Versions(ExpertArena):
    """Random experts, expert `e` at `tiers[e % len(tiers)]`; `plain` has what each stands for."""

    def __init__(self, tiers: tuple[str, ...], group: int) -> None:
        bases = dict.fromkeys(base for base in map(base_tier, tiers) if base is not None and base not in tiers)
        super().__init__(SHAPE, [tier_format(tier, group) for tier in (*tiers, *bases)])
        generator = torch.Generator().manual_seed(1)
        self.blocks: list[torch.Tensor] = []
        self.plain: list[ExpertWeights] = []
        self.words = np.zeros(SHAPE.experts, np.uint64)
        for expert in range(SHAPE.experts):
            matrices = [
                torch.randn(rows, columns, generator=generator) * columns**-0.5
                for rows, columns in ((384, 256), (384, 256), (256, 384))
            ]
            self.words[expert] = self._add(ExpertWeights(*matrices), expert % len(tiers))
        self.arena = CpuDevice().allocate(self._end)
        self.arena.host_view(0, self._end)[:] = torch.cat(self.blocks).numpy()

    @property
    def _end(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def _add(self, weights: ExpertWeights, index: int) -> int:
        """The handle of a new version."""
        fmt, below = self.formats[index], self.bases[index]
        first = self._end
        if below is None:
            self.blocks.append(encode(weights, fmt, SHAPE.expert, "rtn").block)
            self.plain.append(decode(self.blocks[-1], fmt, SHAPE.expert))
            return encode_handle(index, first)
        base = Base(encode(weights, self.formats[below], SHAPE.expert, "rtn").block, self.formats[below])
        nested = encode_nested(weights, base, fmt, SHAPE.expert).block
        self.plain.append(decode(nested, fmt, SHAPE.expert, base))
        self.blocks += [nested, base.block]
        return encode_handle(index, first + nested.nbytes, first)


def plain(function: GateFunction, interleaved: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def gate(both: torch.Tensor) -> torch.Tensor:
        first, second = (both[..., ::2], both[..., 1::2]) if interleaved else both.chunk(2, -1)
        return function.apply(first, second)

    return gate


def functions(gate: GateFunction = SWIGLU, interleaved: bool = False, biased: bool = False) -> LayerFunctions:
    generator = torch.Generator().manual_seed(2)
    up = torch.randn(SHAPE.experts, 2 * 384, generator=generator) if biased else None
    down = torch.randn(SHAPE.experts, 256, generator=generator) if biased else None
    return LayerFunctions(plain(gate, interleaved), interleaved, up, down, gate)


def call(tokens: int, words: np.ndarray, layer: LayerFunctions, top_k: int = TOP_K) -> ExpertsCall:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(SHAPE.experts, generator=generator)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k, generator=generator)
    return ExpertsCall(torch.randn(tokens, 256, generator=generator), ids, weights, words, layer)


def exact(versions: Versions, what: ExpertsCall) -> torch.Tensor:
    """The same in float64, token by token."""
    out = torch.zeros(what.hidden.shape, dtype=torch.float64)
    layer = what.functions
    for token, (ids, weights) in enumerate(zip(what.ids, what.weights, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            matrices = versions.plain[expert]
            x = what.hidden[token].to(torch.float64)
            first, second = matrices.gate.double() @ x, matrices.up.double() @ x
            both = torch.stack((first, second), -1).flatten() if layer.interleaved else torch.cat((first, second))
            if layer.gate_up_bias is not None:
                both = both + layer.gate_up_bias[expert].double()
            result = matrices.down.double() @ layer.gate(both)
            if layer.down_bias is not None:
                result = result + layer.down_bias[expert].double()
            out[token] += weight * result
    return out


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("instructions", instruction_sets())
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("tier", BOUNDS)
def test_every_format_within_its_bound_of_float64(tier: str, group: int, instructions: str) -> None:
    versions = Versions((tier,), group)
    what = call(9, versions.words, functions())
    expected = exact(versions, what)
    assert error(NativeKernel(versions, "fp32", instructions).forward(what), expected) < 2e-6
    rounded = error(NativeKernel(versions, "int8", instructions).forward(what), expected)
    assert rounded < BOUNDS[tier]
    assert tier == "bf16" or rounded > 2e-6  # activations were really rounded


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("gate", [SWIGLU, CLAMPED])
@pytest.mark.parametrize("tiers", [TIERS, MIXED, UNEVEN], ids=["plain", "nested", "uneven"])
def test_gates_biases_and_mixed_tiers(
    tiers: tuple[str, ...], gate: GateFunction, interleaved: bool, biased: bool
) -> None:
    versions = Versions(tiers, 64)
    what = call(13, versions.words, functions(gate, interleaved, biased))
    assert error(NativeKernel(versions, "fp32").forward(what), exact(versions, what)) < 2e-6
    assert error(NativeKernel(versions, "int8").forward(what), exact(versions, what)) < 0.02


@pytest.mark.parametrize("activations", ["int8", "fp32"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 300])
def test_bit_equal_whatever_the_batch_and_the_threads(
    activations: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = Versions(("int2+2", "int3", "int4d8", "int4+4", "int8", "int2d3"), 64)
    kernel, what = NativeKernel(versions, activations), call(tokens, versions.words, functions())
    whole = kernel.forward(what)
    alone = [
        kernel.forward(replace(what, hidden=what.hidden[at], ids=what.ids[at], weights=what.weights[at]))
        for at in (slice(token, token + 1) for token in range(tokens))
    ]
    assert torch.equal(whole, torch.cat(alone))
    for threads in (1, 3):
        monkeypatch.setattr("dynaexq.kernels.native.thread_count", lambda threads=threads: threads)
        assert torch.equal(whole, kernel.forward(what))


def test_bfloat16_in_and_out_differs_by_rounding_alone() -> None:
    versions = Versions(("int4", "bf16"), 32)
    what = call(5, versions.words, functions())
    kernel = NativeKernel(versions, "fp32")
    narrow = kernel.forward(replace(what, hidden=what.hidden.bfloat16()))
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, kernel.forward(replace(what, hidden=what.hidden.bfloat16().float())).bfloat16())
    half = kernel.forward(replace(what, hidden=what.hidden.half()))
    assert half.dtype == torch.float16 and half.isfinite().all()


def test_strided_inputs_and_narrow_ids() -> None:
    versions = Versions(("int4",), 64)
    what = call(6, versions.words, functions())
    kernel = NativeKernel(versions, "int8")
    wide = torch.randn(6, 512)
    wide[:, ::2] = what.hidden
    odd = replace(what, hidden=wide[:, ::2], ids=what.ids.to(torch.int32), weights=what.weights.double())
    assert torch.equal(kernel.forward(odd), kernel.forward(what))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("activations", ["int8", "fp32"])
def test_what_is_not_finite_stays_visible_and_alone(poison: float, activations: str) -> None:
    versions = Versions(("int2", "int8"), 64)
    what = call(9, versions.words, functions())
    kernel = NativeKernel(versions, activations)
    clean = kernel.forward(what)
    hidden = what.hidden.clone()
    hidden[4, 100] = poison
    found = kernel.forward(replace(what, hidden=hidden))
    assert not found[4].isfinite().all()
    others = [token for token in range(9) if token != 4]
    assert torch.equal(found[others], clean[others])


def test_tiny_values_are_zero_and_not_noise() -> None:
    versions = Versions(("int2", "int4", "int8"), 64)
    what = call(4, versions.words, functions())
    for size in (0.0, 1e-44, 1e-38, 1e-32):
        found = NativeKernel(versions, "int8").forward(replace(what, hidden=torch.full_like(what.hidden, size)))
        assert found.isfinite().all() and found.abs().max() < 1e-20


@pytest.mark.parametrize("wrong", [-1, 6, 1 << 40])
def test_an_expert_that_is_not_there(wrong: int) -> None:
    versions = Versions(("int4",), 64)
    what = call(2, versions.words, functions())
    ids = what.ids.clone()
    ids[1, 2] = wrong
    with pytest.raises(IndexError, match=f"expert id {wrong} is not there"):
        NativeKernel(versions, "int8").forward(replace(what, ids=ids))


@pytest.mark.parametrize(
    "word",
    [
        encode_handle(9, 0),
        encode_handle(0, 1 << 30),
        encode_handle(1, 0, 1 << 30),
        encode_handle(1, 1 << 30, 0),
        encode_handle(1, 0),
    ],
)
def test_a_handle_that_points_nowhere(word: int) -> None:
    versions = Versions(("int4", "int4+4"), 64)
    words = versions.words.copy()
    words[:] = word
    with pytest.raises(IndexError, match="points nowhere"):
        NativeKernel(versions, "int8").forward(call(2, words, functions()))


def test_no_tokens() -> None:
    versions = Versions(("int4",), 64)
    what = call(1, versions.words, functions())
    none = replace(what, hidden=what.hidden[:0], ids=what.ids[:0], weights=what.weights[:0])
    assert NativeKernel(versions, "int8").forward(none).shape == (0, 256)


def test_a_gate_without_a_native_form_goes_to_the_reference_and_says_so_once() -> None:
    versions = Versions(("int4", "bf16"), 64)
    what = call(5, versions.words, replace(functions(), native_gate=None))
    kernel = make_kernel("native", versions)
    assert kernel.fallback is None
    with pytest.warns(UserWarning, match="no native form: experts go through the reference kernel"):
        found = kernel.forward(what)
    assert torch.equal(found, make_kernel("reference", versions).forward(what))
    assert kernel.fallback == "the family's gate function has no native form"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.forward(replace(what, functions=replace(functions(), native_gate=None)))
