"""Which of the native gate functions a family's own gate is, found out by comparing what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

PROBE_ROWS = 8
PROBE_RANGE = 12.0
TOLERANCE = 1e-5


@dataclass(frozen=True)
class GateFunction:
    """A gate that the native kernels have: `silu(gate) * up`, or gpt_oss's clamped form.

    Clamped: gate at most `limit`, up within `limit`, then `(up + 1) * gate * sigmoid(alpha * gate)`.
    """

    clamped: bool = False
    alpha: float = 1.0
    limit: float = 0.0

    def apply(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """The reference: gate and up [tokens, intermediate] -> [tokens, intermediate]."""
        if not self.clamped:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


def recognise_gate(
    gate: Callable[[torch.Tensor], torch.Tensor],
    interleaved: bool,
    intermediate: int,
    candidates: Iterable[GateFunction],
) -> GateFunction | None:
    """The candidate that computes what `gate` does on random values far into its saturation; None if none does."""
    values = torch.linspace(-PROBE_RANGE, PROBE_RANGE, PROBE_ROWS * 2 * intermediate)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    both = values[order].reshape(PROBE_ROWS, 2 * intermediate)
    first, second = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, -1)
    with torch.no_grad():
        found = gate(both.clone())
    for candidate in candidates:
        expected = candidate.apply(first, second)
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return candidate
    return None
