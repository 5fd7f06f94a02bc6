"""Traffic of simulated passes: by tier, whatever moves meanwhile, as a real recorder adds it up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.simulate.traffic import TierTally

LAYERS, EXPERTS, TIERS = 2, 3, 3


@given(st.lists(st.tuples(st.sampled_from(["add", "move", "take"]), st.integers(0, 2**32 - 1)), max_size=30))
def test_traffic_counts_at_the_tier_it_ran_at(steps: list[tuple[str, int]]) -> None:
    levels = np.zeros((LAYERS, EXPERTS), np.int8)
    tally, expected = TierTally(TIERS, levels), np.zeros((TIERS, LAYERS))
    for what, seed in [*steps, ("take", 0)]:
        random = np.random.default_rng(seed)
        if what == "add":
            counts = random.integers(0, 100, LAYERS * EXPERTS).astype(np.float64)
            tally.add(counts)
            for place, count in enumerate(counts):
                expected[levels.flat[place], place // EXPERTS] += count
        elif what == "move":
            places = np.flatnonzero(random.random(LAYERS * EXPERTS) < 0.4)
            moved = random.integers(0, TIERS, len(places))
            levels.flat[places] = moved
            tally.move(places, moved)
        else:
            assert np.array_equal(tally.take(), expected)
            expected[:] = 0
