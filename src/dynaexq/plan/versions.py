"""Which tiers experts move between, and how many experts each of them holds. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dynaexq.core import ModelShape, OptionError
from dynaexq.formats import tier_rank
from dynaexq.formats.base import base_tier
from dynaexq.policy.allocation import allocate
from dynaexq.policy.hotness import Scores
from dynaexq.policy.ladder import Levels
from dynaexq.policy.selection import pick_hottest
from dynaexq.residency.layout import (
    PoolPlan,
    choose_layout,
    default_spare,
    plan_ladder,
    plan_pair,
    share_evenly,
    share_spare,
)
from dynaexq.store.sensitivity import Sensitivity

SLOTS = ("layer", "model")
"""layer: every layer has as many high slots, of two tiers (the dynaexq paper); model: all layers share the slots of all
tiers, by what experts lose at them."""

UNSEEN_TRAFFIC = 0.05
"""Part of an average expert's traffic that is added to each expert's: other texts may use what calibration did not."""


class VersionPlan(NamedTuple):
    """Tiers from the highest down, their pools, and whether all layers share them."""

    tiers: tuple[str, ...]
    pools: PoolPlan
    over_model: bool


class VersionWish(NamedTuple):
    """The highest and the lowest tier, and how to spend bytes between them; None: by what is known. `shadow` keeps a
    scratch block for probes, where experts move by what they lose."""

    high: str
    low: str
    slots: str | None = None
    layout: str | None = None
    spare: int | None = None
    shadow: bool = False


def check_slots(slots: str | None) -> None:
    """Raise OptionError for an unknown way to share slots."""
    if slots is not None and slots not in SLOTS:
        raise OptionError(f"unknown slots '{slots}'; known are {', '.join(SLOTS)}")


def plan_versions(
    shape: ModelShape, size: Callable[[str], int], wish: VersionWish, budget: int, known: Sensitivity | None
) -> VersionPlan:
    """Spend `budget` bytes on versions between two tiers.

    Two tiers get as many high slots as there is room for. More of them, where it is known what versions lose, hold as
    many experts as the allocation with the least loss under the calibration's traffic gives each.

    Args:
        size: bytes of a version of a tier, padding included.

    Raises:
        OptionError: see choose_layout.
    """
    over_model = (wish.slots or ("model" if known else "layer")) == "model"
    ladder: tuple[str, ...] = (wish.high, wish.low)
    if known and over_model and not base_tier(wish.high) and wish.layout != "keep":
        ladder = ladder_between(known.tiers, wish.high, wish.low)
    layout = choose_layout(wish.layout, ladder, wish.spare)
    spare = default_spare(shape) if wish.spare is None else wish.spare
    while known and len(ladder) > 2:
        sizes = [size(tier) for tier in ladder]
        extra, scratch = share_spare(spare, len(ladder)), sizes[0] if wish.shadow else 0
        room = budget - scratch - sum(each * more for each, more in zip(sizes, extra, strict=True))
        if room < sizes[-1] * shape.layers * shape.experts:
            ladder = ladder[1:]  # fewer tiers need less to spare
            continue
        levels = choose_levels(known, ladder, sizes, room, known.traffic)
        counts = np.bincount(levels.ravel(), minlength=len(ladder)).tolist()
        if all(counts[:-1]):
            return VersionPlan(ladder, plan_ladder(sizes, counts, spare, scratch), over_model)
        if counts[0] == 0:  # one at a time: the plan of what is left is the plan of these ends
            ladder = ladder[1:]
        else:
            ladder = (*(tier for tier, count in zip(ladder[:-1], counts, strict=False) if count), wish.low)
    high = ladder[0] if len(ladder) > 1 else wish.high
    pair, scratch = (size(high), size(wish.low)), size(high)
    if wish.shadow and known and over_model and layout == "replace":
        pools = plan_pair(shape, *pair, budget - scratch, layout, wish.spare)
        if pools.raised:
            return VersionPlan((high, wish.low), replace(pools, scratch=scratch), over_model)
    return VersionPlan((high, wish.low), plan_pair(shape, *pair, budget, layout, wish.spare), over_model)


def plan_map(
    shape: ModelShape,
    size: Callable[[str], int],
    wish: VersionWish,
    budget: int,
    known: Sensitivity | None,
    traffic: Scores,
) -> tuple[tuple[str, ...], Levels]:
    """Tiers from the highest down, and the level of every expert for good, [layers, experts], under `traffic`.

    Args:
        size, budget, known: see plan_versions.
    """
    if known and wish.slots != "layer":
        ladder = ladder_between(known.tiers, wish.high, wish.low)
        return ladder, choose_levels(known, ladder, [size(tier) for tier in ladder], budget, traffic)
    plan = plan_versions(shape, size, wish, budget, known)
    groups = 1 if plan.over_model else shape.layers
    hottest = pick_hottest(traffic.reshape(groups, -1), share_evenly(plan.pools.slots[0], groups))
    return plan.tiers, np.where(hottest.reshape(traffic.shape), 0, 1).astype(np.int8)


def choose_levels(
    known: Sensitivity, ladder: Sequence[str], sizes: Sequence[int], budget: int, traffic: Scores
) -> Levels:
    """The level of every expert, [layers, experts], that loses least under `traffic` [layers, experts, any scale].

    Tiers and sizes go from the highest down. Super experts get the highest tier, where there is room for it.
    """
    places = [known.tiers.index(tier) for tier in reversed(ladder)]
    rising = np.array(sizes[::-1])
    expected = traffic + UNSEEN_TRAFFIC * traffic.mean() if traffic.any() else np.ones(traffic.shape)
    losses = (known.losses[:, :, places] * expected[:, :, None]).reshape(-1, len(places))
    least = np.zeros(traffic.shape, np.int64)
    for key in known.super_experts:
        least[key] = len(places) - 1
    if rising[least].sum() > budget:
        least[:] = 0
    chosen = allocate(losses, rising.tolist(), budget, least.ravel()).tiers
    return (len(places) - 1 - chosen).astype(np.int8).reshape(traffic.shape)


def drops_between(known: Sensitivity, ladder: Sequence[str]) -> Scores:
    """What a selection loses less at each tier of `ladder` but the lowest than at the next one, [tiers - 1, layers,
    experts]."""
    losses = np.moveaxis(known.losses[:, :, [known.tiers.index(tier) for tier in ladder]], -1, 0)
    return np.maximum(losses[1:] - losses[:-1], 0.0)


def ladder_between(tiers: Sequence[str], high: str, low: str) -> tuple[str, ...]:
    """Those of `tiers` that stand alone, from `high` down to `low`."""
    found = {tier for tier in tiers if tier_rank(low) < tier_rank(tier) < tier_rank(high) and not base_tier(tier)}
    return (high, *sorted(found, key=tier_rank, reverse=True), low)
