"""How many blocks each pool has: the arithmetic of both residency layouts (dynaexq paper, section 2). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynaexq.core import ModelShape, OptionError
from dynaexq.formats.base import base_tier

LAYOUTS = ("replace", "keep")
"""replace: a high version takes the place of the low one; keep: the low version stays resident under it, and a nested
high version is but the rest."""

MAX_DEFAULT_SPARE = 16
EXPERTS_PER_SPARE = 50
"""Spare blocks unless chosen: enough for 16 exchanges at once, but not above 2 % of the experts."""

Capacity = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class PoolPlan:
    """Blocks of the high and the low pool, their sizes in bytes, and the high slots by layer (`n_hi`, [layers])."""

    capacity: Capacity
    high_bytes: int
    low_bytes: int
    low_blocks: int
    keep_low: bool

    @property
    def high_blocks(self) -> int:
        """Experts that can be high at once."""
        return int(self.capacity.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of both pools."""
        return self.high_blocks * self.high_bytes + self.low_blocks * self.low_bytes


def default_spare(shape: ModelShape) -> int:
    """Spare low blocks of the layout `replace`."""
    return max(1, min(MAX_DEFAULT_SPARE, shape.layers * shape.experts // EXPERTS_PER_SPARE))


def choose_layout(layout: str | None, tiers: tuple[str, str], spare: int | None = None) -> str:
    """The layout for (high, low) tiers: the one asked for, else `keep` where high is nested in low, else `replace`.

    Raises:
        OptionError: a high tier that is nested in another one than the low tier, or needs what `replace` gives away;
            spare blocks that it would not use.
    """
    base = base_tier(tiers[0])
    if base not in (None, tiers[1]):
        raise OptionError(f"the high tier {tiers[0]} goes with the low tier {base}, which it refines, not {tiers[1]}")
    if base is not None and layout == "replace":
        raise OptionError(f"layout 'replace' would give away the {base} versions that {tiers[0]} refines; leave it out")
    if base is not None and spare is not None:
        raise OptionError(f"{tiers[0]} is nested in {tiers[1]}, so nothing is exchanged: leave out spare")
    return layout or ("replace" if base is None else "keep")


def check_layout(layout: str | None, spare: int | None) -> None:
    """Raise OptionError for an unknown layout, or spare blocks that would not be used or cannot work."""
    if layout is not None and layout not in LAYOUTS:
        raise OptionError(f"unknown layout '{layout}'; known layouts are {', '.join(LAYOUTS)}")
    if spare is not None and layout == "keep":
        raise OptionError("layout 'keep' needs no spare blocks: leave out spare")
    if spare is not None and spare < 1:
        raise OptionError(f"spare {spare}: two full pools could not exchange anything, so at least 1 block is spare")


def plan_pools(
    shape: ModelShape, high_bytes: int, low_bytes: int, budget: int, layout: str = "replace", spare: int | None = None
) -> PoolPlan:
    """Spend `budget` bytes on as many high slots as it affords, shared evenly over layers.

    Args:
        high_bytes, low_bytes: of one version, padding included.
        spare: low blocks beyond need in the layout `replace`, through which pools exchange experts; several let
            several exchanges run at once. 0 is for maps that never change.
    """
    total = shape.layers * shape.experts
    if layout == "keep":
        slots = (budget - low_bytes * total) // high_bytes
    else:
        spare = default_spare(shape) if spare is None else spare
        slots = (budget - low_bytes * (total + spare)) // (high_bytes - low_bytes)
    slots = max(0, min(total, slots))
    low = total if layout == "keep" else total - slots + (spare or 0 if slots else 0)
    return PoolPlan(share_evenly(slots, shape.layers), high_bytes, low_bytes, low, layout == "keep")


def share_evenly(slots: int, layers: int) -> Capacity:
    """`slots` over `layers`, the first layers taking what is left over."""
    capacity: np.ndarray[Any, np.dtype[np.int64]] = np.full(layers, slots // layers, np.int64)
    capacity[: slots % layers] += 1
    return capacity
