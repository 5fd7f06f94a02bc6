"""Nested formats: a version that refines another one, and holds only what that one lacks.

A base with codes `l` and `n` bits `r` more make codes `2^(n / 2) * l + r` in steps of `scale / 2^(n / 2)`: residuals
overlap, and reach further than to the middle between two codes of the base. A fitted base is not the nearest to the
weights, for it makes good what other columns lose; the overlap leaves it as good as it is alone, and makes what is
nested next to lossless at 4 + 4 bits (two steps to either side). At 2 + 2 so wide a reach leaves little resolution.
"""

from __future__ import annotations

import torch

from dynaexq.formats.base import ExpertFormat
from dynaexq.formats.quantizers import Codes


def refine(base: Codes, lower: torch.Tensor, fmt: ExpertFormat) -> Codes:
    """Whole codes uint8 [rows, columns], scale and offset float32 [rows, groups], for residuals uint8 of that shape."""
    scale, offset = fine_grid(base, fmt)
    return Codes((base.codes << fmt.shift) + lower, scale, offset)


def fine_grid(base: Codes, fmt: ExpertFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset float32 [rows, groups] of a nested format's whole codes."""
    assert base.offset is not None
    scale = base.scale.to(torch.float32) / (1 << fmt.shift)
    return scale, base.offset.to(torch.float32) - scale * (((1 << fmt.bits) - 1) / 2)
