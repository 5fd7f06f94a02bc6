"""Levels on a ladder of tiers: nested sets, slots kept, pins held, and exchanges only where they pay."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaexq.policy import SelectionOptions, select_high
from dynaexq.policy.ladder import Ladder

LAYERS, EXPERTS = 3, 8
HELD, MOVED = (15, 4, 4), (51, 32, 24)


def nobody() -> Any:
    return np.zeros((LAYERS, EXPERTS), bool)


@given(
    seed=st.integers(0, 10_000),
    slots=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    by_layer=st.booleans(),
    margin=st.sampled_from([None, 0.0, 0.05]),
    pins=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_slots_are_kept_and_pins_hold(
    seed: int, slots: list[int], by_layer: bool, margin: float | None, pins: bool
) -> None:
    random = np.random.default_rng(seed)
    groups = LAYERS if by_layer else 1
    shared = np.stack([np.full(groups, count // groups) for count in slots])
    drops = np.sort(random.random((3, LAYERS, EXPERTS)), 0)
    ladder = Ladder(shared, drops, HELD, MOVED)
    current = random.integers(0, 4, (LAYERS, EXPERTS)).astype(np.int8)
    high, low = nobody(), nobody()
    if pins and shared[0].min() > 0:
        high[0, 0] = low[1, 1] = True
    options = None if margin is None else SelectionOptions(margin)
    hotness = random.random((LAYERS, EXPERTS)) * random.integers(0, 2, (LAYERS, EXPERTS))
    levels = ladder.choose(hotness, current, options, high, low)
    assert (levels[high] == 0).all() and (levels[low] == 3).all()
    grouped = levels.reshape(groups, -1)
    for border in range(3):
        above = (grouped <= border).sum(1)
        assert (above <= shared[: border + 1].sum(0)).all()
        if options is None and not pins:
            assert (above == np.minimum(shared[: border + 1].sum(0), grouped.shape[1])).all()


def test_two_tiers_shared_by_layers_are_the_papers_choice() -> None:
    random = np.random.default_rng(1)
    hotness, slots = random.random((LAYERS, EXPERTS)), np.array([2, 3, 1])
    current = np.ones((LAYERS, EXPERTS), np.int8)
    ladder = Ladder(slots[None], None, HELD[:1], MOVED[:1])
    levels = ladder.choose(hotness, current, SelectionOptions(), nobody(), nobody())
    assert np.array_equal(levels == 0, select_high(hotness, current == 0, slots, SelectionOptions()))


def test_hot_experts_that_lose_little_make_room_for_others() -> None:
    """What decides is traffic times what a selection loses, over all layers."""
    hotness, drops = np.ones((LAYERS, EXPERTS)), np.ones((1, LAYERS, EXPERTS))
    hotness[0], drops[0, 0] = 10.0, 0.01
    drops[0, 2] = 5.0
    ladder = Ladder(np.array([[EXPERTS]]), drops, HELD[:1], MOVED[:1])
    levels = ladder.choose(hotness, np.ones((LAYERS, EXPERTS), np.int8), SelectionOptions(), nobody(), nobody())
    assert (levels[2] == 0).all() and (levels[:2] == 1).all()


def test_an_exchange_must_be_worth_what_it_moves() -> None:
    """The last slot saves its gain with 8 bytes, an exchange moves 28: it must save the margin times 3.5 times that."""
    hotness = np.ones((LAYERS, EXPERTS))
    current = np.ones((LAYERS, EXPERTS), np.int8)
    current[0, 0] = 0
    ladder = Ladder(np.array([[1]]), np.ones((1, LAYERS, EXPERTS)), (8,), (28,))
    for gain, margin, moves in ((1.3, 0.1, False), (1.6, 0.1, True), (1.01, 0.0, True)):
        hotness[1, 1] = gain
        levels = ladder.choose(hotness, current, SelectionOptions(margin), nobody(), nobody())
        assert bool(levels[1, 1] == 0) is moves and bool(levels[0, 0] == 1) is moves, (gain, margin)
