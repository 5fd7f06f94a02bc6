from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from dynaexq.kernels.gates import GateFunction, recognise_gate

SWIGLU, CLAMPED = GateFunction(), GateFunction(True, 1.702, 7.0)
CANDIDATES = [SWIGLU, CLAMPED]


def halves(function: GateFunction) -> object:
    return lambda both: function.apply(*both.chunk(2, -1))


def test_gates_are_told_apart_by_what_they_compute() -> None:
    assert recognise_gate(halves(SWIGLU), False, 32, CANDIDATES) is SWIGLU
    assert recognise_gate(halves(CLAMPED), False, 32, CANDIDATES) is CLAMPED
    assert recognise_gate(lambda both: CLAMPED.apply(both[..., ::2], both[..., 1::2]), True, 32, CANDIDATES) is CLAMPED


def test_anything_else_is_not_recognised() -> None:
    assert (
        recognise_gate(lambda both: F.gelu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1], False, 32, CANDIDATES) is None
    )
    assert recognise_gate(halves(GateFunction(True, 1.702, 6.5)), False, 32, CANDIDATES) is None
    assert recognise_gate(halves(GateFunction(True, 1.7, 7.0)), False, 32, CANDIDATES) is None
    assert recognise_gate(halves(SWIGLU), True, 32, CANDIDATES) is None  # the other order of gate and up
    assert recognise_gate(lambda both: SWIGLU.apply(*both.chunk(2, -1)) * 1.001, False, 32, CANDIDATES) is None
    assert recognise_gate(torch.relu, False, 32, CANDIDATES) is None
