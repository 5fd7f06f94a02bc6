from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.core import OptionError
from dynaexq.policy import Hotness, HotnessOptions, SelectionOptions, pick_hottest, select_high

SEEDS = st.integers(0, 1 << 30)


def random_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    layers, experts = random.integers(1, 4), random.integers(2, 12)
    scores = random.integers(0, 5, (layers, experts)) / 10  # many ties
    current = random.random((layers, experts)) < random.random()
    return scores, current, random.integers(0, experts + 1, layers)


@given(SEEDS, st.sampled_from([0.0, 0.05, 0.2]), st.integers(0, 3))
def test_capacity_holds_and_nothing_leaves_without_a_hotter_one(seed: int, margin: float, slack: int) -> None:
    scores, current, capacity = random_case(seed)
    wanted = select_high(scores, current, capacity, SelectionOptions(margin, slack))
    assert (wanted.sum(1) <= capacity).all()
    for layer in range(len(scores)):
        left = np.flatnonzero(current[layer] & ~wanted[layer])
        came = np.flatnonzero(wanted[layer] & ~current[layer])
        if current[layer].sum() <= capacity[layer] and len(left):
            assert scores[layer, came].max() > scores[layer, left].min() + margin
            free = capacity[layer] - current[layer].sum()
            assert len(came) >= len(left)
            assert len(came) <= len(left) + free


def select_slowly(scores: np.ndarray, current: np.ndarray, capacity: int, margin: float, slack: int) -> set[int]:
    """One layer, as select_high is described."""
    ranked = sorted(range(len(scores)), key=lambda expert: (-scores[expert], expert))
    members = [expert for expert in ranked if current[expert]][:capacity]
    outsiders = [expert for expert in ranked if expert not in members]
    if current.sum() < capacity:
        came = [expert for expert in outsiders if scores[expert] > 0][: capacity - len(members)]
        members = sorted(members + came, key=ranked.index)
        outsiders = [expert for expert in outsiders if expert not in came]
    wanted = set(members)
    for enters, leaves in zip(outsiders, reversed(members), strict=False):
        apart = ranked.index(enters) < capacity - slack and ranked.index(leaves) >= capacity + slack
        if not (scores[enters] > scores[leaves] + margin and (slack == 0 or apart)):
            break
        wanted = wanted - {leaves} | {enters}
    return wanted


@given(SEEDS, st.sampled_from([0.0, 0.05, 0.2]), st.integers(0, 3))
def test_the_vectorised_selection_equals_the_slow_one(seed: int, margin: float, slack: int) -> None:
    scores, current, capacity = random_case(seed)
    wanted = select_high(scores, current, capacity, SelectionOptions(margin, slack))
    for layer in range(len(scores)):
        expected = select_slowly(scores[layer], current[layer], int(capacity[layer]), margin, slack)
        assert set(np.flatnonzero(wanted[layer])) == expected


@given(SEEDS)
def test_a_static_map_takes_the_hottest(seed: int) -> None:
    scores, _, capacity = random_case(seed)
    picked = pick_hottest(scores, capacity)
    for layer in range(len(scores)):
        ranked = sorted(range(scores.shape[1]), key=lambda expert: (-scores[layer, expert], expert))
        assert set(np.flatnonzero(picked[layer])) == set(ranked[: capacity[layer]])


@given(SEEDS)
def test_without_hysteresis_the_result_is_a_top_n(seed: int) -> None:
    scores, current, capacity = random_case(seed)
    wanted = select_high(scores, current, capacity, SelectionOptions())
    for layer in range(len(scores)):
        inside, outside = scores[layer, wanted[layer]], scores[layer, ~wanted[layer]]
        if len(inside) and len(outside) and len(inside) == capacity[layer]:
            assert inside.min() >= outside.max()


@given(SEEDS, st.sampled_from([0.0, 0.05]), st.integers(0, 2))
def test_the_wanted_set_is_stable(seed: int, margin: float, slack: int) -> None:
    """C3: without new traffic a second tick moves nothing."""
    scores, current, capacity = random_case(seed)
    options = SelectionOptions(margin, slack)
    wanted = select_high(scores, current, capacity, options)
    assert np.array_equal(select_high(scores, wanted, capacity, options), wanted)


def test_near_ties_do_not_thrash() -> None:
    random = np.random.default_rng(0)
    base = np.array([[0.3, 0.201, 0.2, 0.199, 0.1]])
    capacity = np.array([2])

    def changes(options: SelectionOptions) -> int:
        current = select_high(base, np.zeros_like(base, bool), capacity, options)
        moved = 0
        for _ in range(200):
            wanted = select_high(base + random.normal(0, 0.004, base.shape), current, capacity, options)
            moved += int((wanted & ~current).sum())
            current = wanted
        return moved

    assert changes(SelectionOptions(margin=0.03)) == 0
    assert changes(SelectionOptions()) > 50


def test_rank_slack_keeps_neighbours_of_the_border() -> None:
    scores = np.array([[5.0, 4.0, 3.0, 2.0, 1.0]])
    current = np.array([[True, False, True, False, False]])
    capacity = np.array([2])
    assert select_high(scores, current, capacity, SelectionOptions(rank_slack=1)).tolist() == current.tolist()
    assert select_high(scores, current, capacity, SelectionOptions()).tolist() == [[True, True, False, False, False]]


def test_few_tokens_make_little_forgotten() -> None:
    """Sixteen intervals of one selection for each expert forget as much as one of sixteen."""
    small, whole = Hotness(1, 2, HotnessOptions(alpha=0.5)), Hotness(1, 2, HotnessOptions(alpha=0.5))
    before = np.array([[64.0, 0.0]])
    for hotness, traffic, times in ((small, np.array([[0.0, 2.0]]), 16), (whole, np.array([[0.0, 32.0]]), 1)):
        hotness.restore(before)
        for _ in range(times):
            hotness.update(np.zeros((1, 2)), traffic)
        assert np.isclose(hotness.sums[0, 0], 32.0)
    assert 0.6 < small.scores[0, 1] / whole.scores[0, 1] < 1


def test_hotness_is_the_papers_average_over_the_mean_of_its_layer() -> None:
    hotness = Hotness(1, 2, HotnessOptions(alpha=0.5, prefill_weight=0.25))
    assert hotness.scores.tolist() == [[0, 0]]
    hotness.update(np.array([[160.0, 0.0]]), np.array([[0.0, 40.0]]))
    assert hotness.scores.tolist() == [[1.0, 1.0]]
    hotness.update(np.zeros((1, 2)), np.array([[0.0, 60.0]]))
    assert hotness.scores.tolist() == [[0.4, 1.6]]
    other = Hotness(1, 2, HotnessOptions())
    other.restore(hotness.sums)
    assert other.scores.tolist() == [[0.4, 1.6]]


def test_options_out_of_range() -> None:
    for options in (HotnessOptions(alpha=1.0), HotnessOptions(prefill_weight=-1)):
        with pytest.raises(OptionError):
            options.check()
    with pytest.raises(OptionError):
        SelectionOptions(margin=-1).check()
