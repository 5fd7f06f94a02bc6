"""Pins: always kept, and the rest of a layer is chosen as if the pinned experts were not there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.policy import SelectionOptions, select_high
from dynaexq.policy.pins import LEAST, select_beside_pins

LAYERS, EXPERTS = 2, 6


@given(
    seed=st.integers(0, 10_000),
    capacity=st.lists(st.integers(0, EXPERTS), min_size=LAYERS, max_size=LAYERS),
    margin=st.sampled_from([0.0, 0.2]),
    slack=st.integers(0, 1),
    fresh=st.booleans(),
)
def test_pins_hold_and_the_others_compete(
    seed: int, capacity: list[int], margin: float, slack: int, fresh: bool
) -> None:
    random = np.random.default_rng(seed)
    slots = np.array(capacity)
    scores = random.random((LAYERS, EXPERTS)) * random.integers(0, 2, (LAYERS, EXPERTS))
    kinds = random.integers(0, 4, (LAYERS, EXPERTS))
    high, low = kinds == 0, kinds == 1
    high &= np.cumsum(high, 1) <= slots[:, None]
    current = random.random((LAYERS, EXPERTS)) < 0.4
    options = None if fresh else SelectionOptions(margin, slack)
    wanted = select_beside_pins(scores, current, slots, options, high, low)
    assert (wanted & high).sum() == high.sum() and not (wanted & low).any()
    assert (wanted.sum(1) <= slots).all()
    for layer in range(LAYERS):
        free = ~(high | low)[layer]
        left = slots[layer] - high[layer].sum()
        if fresh:
            assert (wanted & ~high)[layer].sum() == min(left, free.sum())
        elif slack == 0 and free.any():
            traffic = scores[[layer]][:, free] + (LEAST if (high | low).any() else 0.0)
            alone = select_high(traffic, current[[layer]][:, free], np.array([left]), options)
            assert wanted[layer, free].tolist() == alone[0].tolist()


def test_without_pins_it_is_the_plain_choice() -> None:
    scores, current = np.random.default_rng(0).random((LAYERS, EXPERTS)), np.zeros((LAYERS, EXPERTS), bool)
    nobody, slots = np.zeros_like(current), np.array([2, 3])
    wanted = select_beside_pins(scores, current, slots, SelectionOptions(), nobody, nobody)
    assert np.array_equal(wanted, select_high(scores, current, slots, SelectionOptions()))
