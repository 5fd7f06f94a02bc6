"""How many blocks each pool has: the arithmetic of both residency layouts (dynaexq paper, section 2). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dynaexq.core import ModelShape, OptionError
from dynaexq.formats.base import base_tier

LAYOUTS = ("replace", "keep")
"""replace: a version takes the place of the one before; keep: the low version stays resident under the high one, and a
nested high version is but the rest."""

MAX_DEFAULT_SPARE = 16
EXPERTS_PER_SPARE = 100
"""Spare blocks unless chosen: enough for 16 exchanges at once, but not above 1 % of the experts."""

Capacity = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class PoolPlan:
    """Pools from the highest tier down: bytes of a version, experts that can be at each tier but the lowest at once,
    and blocks, spare ones among them; then bytes of scratch behind them."""

    sizes: tuple[int, ...]
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    keep_low: bool
    scratch: int = 0

    @property
    def raised(self) -> int:
        """Experts that can be above the lowest tier at once."""
        return sum(self.slots)

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes that an expert takes more at each tier but the lowest than at the next one."""
        if self.keep_low:
            return self.sizes[:-1]
        return tuple(high - low for high, low in pairwise(self.sizes))

    @property
    def moved(self) -> tuple[int, ...]:
        """Bytes that an exchange of two experts between a tier and the next one moves."""
        return self.sizes[:-1] if self.keep_low else tuple(high + low for high, low in pairwise(self.sizes))

    @property
    def nbytes(self) -> int:
        """Bytes of all pools and the scratch."""
        return self.scratch + sum(size * count for size, count in zip(self.sizes, self.blocks, strict=True))


def default_spare(shape: ModelShape) -> int:
    """Spare blocks of the layout `replace`."""
    return max(1, min(MAX_DEFAULT_SPARE, shape.layers * shape.experts // EXPERTS_PER_SPARE))


def choose_layout(layout: str | None, tiers: Sequence[str], spare: int | None = None) -> str:
    """The layout for tiers from the highest down: the one asked for, else `keep` where the high tier is nested in the
    low one, else `replace`.

    Raises:
        OptionError: a high tier that is nested in another one than the low tier, or needs what `replace` gives away;
            spare blocks that it would not use; `keep` for more than two tiers.
    """
    base = base_tier(tiers[0])
    if base not in (None, tiers[-1]):
        raise OptionError(f"the high tier {tiers[0]} goes with the low tier {base}, which it refines, not {tiers[-1]}")
    if base is not None and layout == "replace":
        raise OptionError(f"layout 'replace' would give away the {base} versions that {tiers[0]} refines; leave it out")
    if base is not None and spare is not None:
        raise OptionError(f"{tiers[0]} is nested in {tiers[-1]}, so nothing is exchanged: leave out spare")
    chosen = layout or ("replace" if base is None else "keep")
    if chosen == "keep" and len(tiers) > 2:
        raise OptionError(
            f"layout 'keep' goes with two tiers, not with {', '.join(tiers)}: leave it out, or say slots=layer"
        )
    return chosen


def check_layout(layout: str | None, spare: int | None) -> None:
    """Raise OptionError for an unknown layout, or spare blocks that would not be used or cannot work."""
    if layout is not None and layout not in LAYOUTS:
        raise OptionError(f"unknown layout '{layout}'; known layouts are {', '.join(LAYOUTS)}")
    if spare is not None and layout == "keep":
        raise OptionError("layout 'keep' needs no spare blocks: leave out spare")
    if spare is not None and spare < 1:
        raise OptionError(f"spare {spare}: two full pools could not exchange anything, so at least 1 block is spare")


def plan_pair(
    shape: ModelShape, high_bytes: int, low_bytes: int, budget: int, layout: str = "replace", spare: int | None = None
) -> PoolPlan:
    """Spend `budget` bytes on as many high slots as it affords.

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
        wider = max(1, high_bytes - low_bytes)  # small versions may round up to the same
        slots = (budget - low_bytes * (total + spare)) // wider
    slots = max(0, min(total, slots))
    low = total if layout == "keep" else total - slots + (spare or 0 if slots else 0)
    return PoolPlan((high_bytes, low_bytes), (slots,), (slots, low), layout == "keep")


def share_spare(spare: int, tiers: int) -> tuple[int, ...]:
    """`spare` blocks over the pools of `tiers` tiers from the highest down: none for the highest, equal shares for the
    others, the lowest first. One block there is enough for a way from any map to any other (tests/residency)."""
    pools = tiers - 1
    each = [spare // pools + (place < spare % pools) for place in range(pools)]
    return (0, *reversed(each))


def plan_ladder(sizes: Sequence[int], counts: Sequence[int], spare: int, scratch: int) -> PoolPlan:
    """Pools for `counts` experts at each tier, `spare` blocks among them and `scratch` bytes, layout `replace`; sizes
    and counts from the highest tier down."""
    blocks = tuple(count + more for count, more in zip(counts, share_spare(spare, len(sizes)), strict=True))
    return PoolPlan(tuple(sizes), tuple(counts[:-1]), blocks, keep_low=False, scratch=scratch)


def share_evenly(slots: int, layers: int) -> Capacity:
    """`slots` over `layers`, the first layers taking what is left over."""
    capacity: np.ndarray[Any, np.dtype[np.int64]] = np.full(layers, slots // layers, np.int64)
    capacity[: slots % layers] += 1
    return capacity
