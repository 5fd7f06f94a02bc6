"""Which tiers experts move between, and how many experts each of them holds. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

SCRATCH_SHARE = 0.005
"""Of the bytes that a scratch block for the shadow signal may take, unless it is asked for."""

Ladder = tuple[str, ...]
"""Tiers from the highest down."""


class VersionPlan(NamedTuple):
    """Tiers from the highest down, their pools, and whether all layers share them."""

    tiers: tuple[str, ...]
    pools: PoolPlan
    over_model: bool


class VersionWish(NamedTuple):
    """The highest and the lowest tier, and how to spend bytes between them; None: by what is known. `shadow` keeps a
    scratch block for probes, where experts move by what they lose and others would have to be read."""

    high: str
    low: str
    slots: str | None = None
    layout: str | None = None
    spare: int | None = None
    shadow: bool | None = None


def check_slots(slots: str | None) -> None:
    """Raise OptionError for an unknown way to share slots."""
    if slots is not None and slots not in SLOTS:
        raise OptionError(f"unknown slots '{slots}'; known are {', '.join(SLOTS)}")


def plan_versions(
    shape: ModelShape, size: Callable[[str], int], wish: VersionWish, budget: int, known: Sensitivity | None
) -> VersionPlan:
    """Spend `budget` bytes on versions between two tiers.

    Where it is not known what versions lose, two tiers get as many high slots as there is room for. Where it is, tiers
    between them are taken in, as far as they bring more than the spare blocks they need, and hold as many experts as
    the allocation with the least loss under the calibration's traffic gives each.

    Args:
        size: bytes of a version of a tier, padding included.

    Raises:
        OptionError: see choose_layout.
    """
    over_model = (wish.slots or ("model" if known else "layer")) == "model"
    pair = (wish.high, wish.low)
    losses = known if over_model and not base_tier(wish.high) and wish.layout != "keep" else None
    ladder = ladder_between(losses.tiers, *pair) if losses else pair
    layout = choose_layout(wish.layout, ladder, wish.spare)
    if losses:
        spare = default_spare(shape) if wish.spare is None else wish.spare
        best = _Ladders(size, wish, spare, budget, losses).find_best(ladder)
        if best is not None:
            return best
    return VersionPlan(pair, plan_pair(shape, size(wish.high), size(wish.low), budget, layout, wish.spare), over_model)


class _Ladders:
    """Ladders with the same lowest tier within the same bytes, compared by what they are predicted to lose."""

    def __init__(
        self, size: Callable[[str], int], wish: VersionWish, spare: int, budget: int, known: Sensitivity
    ) -> None:
        self._size, self._shadow, self._spare, self._budget, self._known = size, wish.shadow, spare, budget, known

    def find_best(self, ladder: Ladder) -> VersionPlan | None:
        """Without the tiers that cost more than they bring, dropped one by one; None: no two tiers fit."""
        loss, plan = self._plan(ladder)
        while len(ladder) > 2:
            shorter = [ladder[:place] + ladder[place + 1 :] for place in range(len(ladder) - 1)]
            tried = [(*self._plan(each), each) for each in shorter]
            least = min(range(len(tried)), key=lambda place: tried[place][0])
            if plan is not None and tried[least][0] > loss:
                break
            loss, plan, ladder = tried[least]
        return plan

    def _plan(self, ladder: Ladder) -> tuple[float, VersionPlan | None]:
        """What a ladder is predicted to lose, and its pools; None where there is no room for a single expert more."""
        sizes, known = [self._size(tier) for tier in ladder], self._known
        extra = share_spare(self._spare, len(ladder))
        wanted = sizes[0] <= SCRATCH_SHARE * self._budget if self._shadow is None else self._shadow
        scratch = sizes[0] if wanted else 0
        room = self._budget - scratch - sum(each * more for each, more in zip(sizes, extra, strict=True))
        if room < sizes[-1] * known.traffic.size:
            return float("inf"), None
        levels = choose_levels(known, ladder, sizes, room, known.traffic)
        counts = np.bincount(levels.ravel(), minlength=len(ladder)).tolist()
        if not all(counts[:-1]):
            return float("inf"), None
        places = np.array([known.tiers.index(tier) for tier in ladder])[levels]
        losses = np.take_along_axis(known.losses, places[:, :, None], 2)[:, :, 0]
        plan = VersionPlan(ladder, plan_ladder(sizes, counts, self._spare, scratch), over_model=True)
        return float((known.traffic * losses).sum()), plan


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
