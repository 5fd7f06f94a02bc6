"""How bytes become pools: two tiers or a ladder, always within the budget, and the same again from what is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaexq.core import ExpertKey, ExpertShape, ModelShape, OptionError
from dynaexq.formats import tier_rank
from dynaexq.plan.versions import VersionPlan, VersionWish, choose_levels, drops_between, plan_map, plan_versions
from dynaexq.residency.layout import default_spare
from dynaexq.store.sensitivity import Sensitivity

SHAPE = ModelShape(4, 32, ExpertShape(64, 32))
SIZES = {"int2": 10, "int2+2": 9, "int3": 14, "int4": 18, "int8": 33, "int4+4": 17, "bf16": 64}
TIERS = ("int2", "int3", "int4", "int8", "bf16")
FLOOR = 10 * 128


def size(tier: str) -> int:
    return SIZES[tier]


def known(seed: int = 0, supers: tuple[ExpertKey, ...] = ()) -> Sensitivity:
    random = np.random.default_rng(seed)
    errors = np.array([16.0, 4.0, 1.0, 0.06, 0.0]) * random.uniform(0.5, 2.0, (4, 32, 1))
    return Sensitivity(TIERS, 1e-4 * errors, random.gamma(0.5, 2.0, (4, 32)), np.ones(4), supers)


@given(budget=st.integers(FLOOR, 70 * 128), seed=st.integers(0, 50), spare=st.sampled_from([None, 1, 5]))
@settings(max_examples=200, deadline=None)
def test_a_ladder_stays_within_its_bytes(budget: int, seed: int, spare: int | None) -> None:
    wish = VersionWish("bf16", "int2", None, None, spare)
    plan = plan_versions(SHAPE, size, wish, budget, known(seed))
    assert plan.pools.nbytes <= budget or plan.pools.raised == 0
    assert plan.tiers[-1] == "int2" and list(plan.tiers) == sorted(plan.tiers, key=tier_rank, reverse=True)
    assert plan.over_model and plan.pools.sizes == tuple(map(size, plan.tiers))
    if len(plan.tiers) > 2:
        assert all(plan.pools.slots)
        spares = np.array(plan.pools.blocks[:-1]) - plan.pools.slots
        total = sum(plan.pools.blocks) - 128
        assert spares[0] == 0 and total == (default_spare(SHAPE) if spare is None else spare)
        assert total - spares.sum() >= max(1, spares.max())  # the lowest pool first


def predicted(plan: VersionPlan, budget: int, losses: Sensitivity) -> float:
    """What a plan loses under the calibration's traffic, its spare blocks aside."""
    counts = [*plan.pools.slots, 128 - plan.pools.raised]
    spare = sum(
        size * (block - count) for size, block, count in zip(plan.pools.sizes, plan.pools.blocks, counts, strict=True)
    )
    levels = choose_levels(losses, plan.tiers, plan.pools.sizes, budget - spare, losses.traffic)
    return loss(levels, plan.tiers, losses)


def test_tiers_that_cost_more_than_they_bring_are_left_out() -> None:
    losses = known()
    for budget in range(FLOOR + 200, 40 * 128, 301):
        plan = plan_versions(SHAPE, size, VersionWish("bf16", "int2"), budget, losses)
        for place in range(len(plan.tiers) - 1 if len(plan.tiers) > 2 else 0):
            rising = (plan.tiers[:place] + plan.tiers[place + 1 :])[::-1]
            places = [losses.tiers.index(tier) for tier in rising]
            only = replace(losses, tiers=rising, losses=losses.losses[:, :, places])
            other = plan_versions(SHAPE, size, VersionWish(rising[-1], "int2"), budget, only)
            assert predicted(plan, budget, losses) <= 1.0001 * predicted(other, budget, losses)


def test_a_scratch_block_is_for_those_who_ask_or_can_afford_it() -> None:
    budget = 20 * 128
    for shadow in (None, True, False):
        plan = plan_versions(SHAPE, size, VersionWish("int8", "int2", shadow=shadow), budget, known())
        assert bool(plan.pools.scratch) is (shadow is True) and plan.pools.nbytes <= budget
    more = {
        name: np.tile(getattr(known(), name), (100, *[1] * (getattr(known(), name).ndim - 1)))
        for name in ("losses", "traffic")
    }
    shape = ModelShape(400, 32, SHAPE.expert)
    assert plan_versions(shape, size, VersionWish("int8", "int2"), 100 * budget, replace(known(), **more)).pools.scratch


def test_what_is_not_known_or_asked_otherwise_gets_two_tiers() -> None:
    budget = 20 * 128
    for wish, losses, over_model in (
        (VersionWish("int8", "int2"), None, False),
        (VersionWish("int8", "int2", "model"), None, True),
        (VersionWish("int8", "int2", "layer"), known(), False),
        (VersionWish("int8", "int2", None, "keep"), known(), True),
        (VersionWish("int2+2", "int2"), known(), True),
    ):
        plan = plan_versions(SHAPE, size, wish, budget, losses)
        assert plan.tiers == (wish.high, wish.low) and plan.over_model is over_model
        assert plan.pools.keep_low is (wish.layout == "keep" or wish.high == "int2+2")
    with pytest.raises(OptionError, match="leave out spare"):
        plan_versions(SHAPE, size, VersionWish("int2+2", "int2", None, None, 3), budget, known())


def loss(levels: Any, ladder: tuple[str, ...], losses: Sensitivity) -> float:
    places = np.array([losses.tiers.index(tier) for tier in ladder])[levels]
    each = np.take_along_axis(losses.losses, places[:, :, None], 2)[:, :, 0]
    return float((losses.traffic * each).sum())


def test_a_map_of_losses_beats_one_of_hotness_with_the_same_bytes() -> None:
    losses, budget = known(4), 15 * 128
    wish = VersionWish("int4", "int2", None, "replace", 0)
    maps = {
        slots: plan_map(SHAPE, size, wish._replace(slots=slots), budget, losses, losses.traffic)
        for slots in (None, "layer")
    }
    for ladder, levels in maps.values():
        assert sum(size(ladder[level]) for level in levels.ravel()) <= budget
    assert maps[None][0] == ("int4", "int3", "int2") and maps["layer"][0] == ("int4", "int2")
    assert loss(maps[None][1], maps[None][0], losses) < 0.9 * loss(maps["layer"][1], maps["layer"][0], losses)


def test_super_experts_are_high_whatever_traffic_says() -> None:
    losses = known(0, (ExpertKey(2, 7),))
    traffic = losses.traffic.copy()
    traffic[2, 7] = 0.0
    ladder = ("int8", "int4", "int3", "int2")
    assert choose_levels(losses, ladder, [*map(size, ladder)], 12 * 128, traffic)[2, 7] == 0
    assert choose_levels(losses, ladder, [*map(size, ladder)], FLOOR, traffic)[2, 7] == 3  # no room for it


def test_drops_are_what_a_selection_loses_less() -> None:
    losses = known()
    drops = drops_between(losses, ("int8", "int3", "int2"))
    assert np.allclose(drops[0], losses.losses[:, :, 1] - losses.losses[:, :, 3])
    assert np.allclose(drops[1], losses.losses[:, :, 0] - losses.losses[:, :, 1])
