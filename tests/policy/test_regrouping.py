"""Which sequences run together: those with similar needs, nobody never, and nobody out of order."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynaexq.core import OptionError
from dynaexq.policy.caching import CacheMap, LeastRecent
from dynaexq.policy.paths import HALF_LIFE, Paths, chance_of_none, distinct_experts
from dynaexq.policy.regrouping import FEW, Regrouper, RegroupingOptions

NEVER = 60_000.0


def ids_of(*choices: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Of one layer, one token after the other."""
    return np.array([choices])


def make_regrouper(paths: Paths, capacity: int, granularity: str, **knobs: Any) -> Regrouper:
    return Regrouper(RegroupingOptions(granularity, **{"timeout_ms": NEVER, "ageing": 0, **knobs}), paths, capacity)


def regroup(targets: list[int], experts: int, granularity: str = "token", **knobs: Any) -> Regrouper:
    """Sequences that keep to one expert each, before a cache of one."""
    paths = Paths(len(targets), 1, experts)
    for slot, target in enumerate(targets):
        paths.note_prompt(slot, ids_of([target]))
    return make_regrouper(paths, 1, granularity, min_batch=1, **knobs)


def count_loads(order: list[int], experts: int) -> int:
    """Of a cache of one expert, which these need one after the other."""
    cache = CacheMap(experts, 1, LeastRecent(experts, 1))
    for expert in order:
        missing, _ = cache.need(np.array([expert]))
        cache.admit(missing)
    return cache.misses


def test_a_hundred_tokens_of_four_experts_are_four_loads() -> None:
    targets = np.random.default_rng(0).permutation(np.repeat(range(4), (40, 30, 20, 10))).tolist()
    regrouper, waiting, order, sizes = regroup(targets, 4), list(range(100)), [], []
    while waiting:
        chosen = regrouper.choose(waiting, 0.0)
        order += chosen
        sizes.append(len(chosen))
        for slot in chosen:
            waiting.remove(slot)
            regrouper.end(slot)
    assert sorted(sizes) == [10, 20, 30, 40]
    assert count_loads([targets[slot] for slot in order], 4) == 4
    assert count_loads(targets, 4) > 50


def test_a_path_is_what_was_chosen_of_late() -> None:
    paths = Paths(2, 2, 4)
    assert not paths.known.any()
    paths.note_prompt(0, np.array([[[0, 1], [0, 2]], [[3, 2], [3, 1]]]))
    assert paths.likely[0].tolist() == [1, 0.5, 0.5, 0, 0, 0.5, 0.5, 1]
    for _ in range(HALF_LIFE):
        paths.note_tokens([0], np.array([[[2, 3]], [[0, 1]]]))
    past = 0.5 * (1 - 0.5 ** (2 / HALF_LIFE)) / (1 - 0.5 ** ((2 + HALF_LIFE) / HALF_LIFE))
    assert paths.likely[0] == pytest.approx(
        [past, past / 2, 1 - past / 2, 1 - past, 1 - past, 1 - past / 2, past / 2, past], abs=1e-5
    )
    assert paths.known.tolist() == [True, False] and not paths.likely[1].any()


def test_tokens_of_several_sequences_are_told_apart() -> None:
    rng, together, alone = np.random.default_rng(0), Paths(4, 3, 8), Paths(4, 3, 8)
    for _ in range(5):
        ids = np.stack([[rng.permutation(8)[:2] for _ in range(3)] for _ in range(3)])
        together.note_tokens([3, 0, 2], ids)
        for place, slot in enumerate((3, 0, 2)):
            alone.note_tokens([slot], ids[:, place : place + 1])
    assert np.allclose(together.likely, alone.likely) and together.likely[1].sum() == 0
    assert together.likely[3].sum() == pytest.approx(3 * 2)


def test_a_beginning_brings_its_path_along_for_as_much_as_it_is() -> None:
    paths = Paths(3, 1, 4)
    paths.note_prompt(0, ids_of(*[[0]] * 200))
    paths.begin(1, 0, 1)
    paths.begin(2, 0, 200)
    for slot in (1, 2):
        assert paths.likely[slot].tolist() == [1, 0, 0, 0]
        paths.note_tokens([slot], ids_of([3]))
    assert paths.likely[1].tolist() == pytest.approx([0.5, 0, 0, 0.5], abs=0.02)
    assert paths.likely[2, 0] > 0.95
    paths.begin(2, 2, 0)
    assert paths.known.tolist() == [True, True, False] and not paths.likely[2].any()


def test_expected_needs() -> None:
    likely = np.array([[0.5, 1, 0], [0.5, 1, 0]], np.float32)
    assert distinct_experts(chance_of_none(likely)) == 1.75
    assert distinct_experts(chance_of_none(likely[:0])) == 0


def test_groups_are_of_those_who_need_the_same_and_no_more_than_fits() -> None:
    paths = Paths(6, 1, 8)
    for slot, choices in enumerate(([0, 1], [4, 5], [0, 1], [4, 5], [0, 2], [6, 7])):
        paths.note_prompt(slot, ids_of(choices))
    for capacity, group in ((2, [0, 2]), (3, [0, 2, 4]), (5, [0, 1, 2, 3, 4]), (8, [0, 1, 2, 3, 4, 5])):
        assert make_regrouper(paths, capacity, "token").choose(range(6), 0.0) == group
    assert make_regrouper(paths, 1, "token", min_batch=1).choose(range(6), 0.0) == [0, 2]
    assert make_regrouper(paths, 2, "token", min_batch=3).choose(range(6), 0.0) == [0, 2, 4]


def test_a_group_keeps_running_for_its_quantum() -> None:
    regrouper = regroup([0, 1, 0, 1, 2], 3, "sequence", quantum=3)
    chosen = [regrouper.choose([0, 1, 2, 3, 4], step) for step in range(10)]
    assert chosen == [[0, 2]] * 3 + [[1, 3]] * 3 + [[4]] * 3 + [[0, 2]]
    counts = regrouper.counts
    assert (counts.steps, counts.split, counts.left_out, counts.groups) == (10, 10, 33, 4)
    regrouper.end(0)
    regrouper.end(2)
    regrouper.begin(0, 0, 9)  # another in the same place is none of the group
    assert regrouper.choose([1, 3, 4, 0], 11) == [1, 3]  # whose own have ended before its time was up


def test_who_was_left_out_too_long_takes_part() -> None:
    for granularity in ("sequence", "token"):
        regrouper = regroup([0, 0, 1, 1], 2, granularity, timeout_ms=20, quantum=1000)
        assert regrouper.choose([0, 1, 2, 3], 0.0) == [0, 1]
        if granularity == "sequence":
            assert regrouper.choose([0, 1, 2, 3], 0.019) == [0, 1]
            assert regrouper.counts.forced == 0
        chosen = regrouper.choose([0, 1, 2, 3], 0.021)
        assert set(chosen) >= {2, 3}
        assert regrouper.counts.forced == 2
        regrouper = regroup([0, 0, 1, 1], 2, granularity, timeout_ms=20, quantum=1000)
        assert regrouper.choose([0, 1, 2, 3], 0.0) == [0, 1]
        for slot in (2, 3):
            regrouper.end(slot)
            regrouper.begin(slot, slot, 9)
        assert regrouper.choose([0, 1, 2, 3], 0.1) == [0, 1]  # the others are new


def test_waiting_makes_up_for_needs() -> None:
    paths = Paths(4, 1, 9)
    for slot, choices in enumerate(([0, 1, 2], [0, 3, 4], [5, 6, 7], [0, 1, 8])):
        paths.note_prompt(slot, ids_of(choices))
    for ageing, group in ((0, [0, 1]), (1000, [0, 2])):
        regrouper = make_regrouper(paths, 6, "token", ageing=ageing, min_batch=2)
        regrouper._last[:] = [1, 4, 4, 3]  # the first has waited for longest
        regrouper._since[:] = [0.0, np.nan, 0.5, np.nan]
        regrouper._step = 4
        paths.likely[3] = 1  # needs everything
        assert regrouper.choose([0, 1, 2, 3], 1.0) == group


def test_few_run_together_and_nobody_may_be_there() -> None:
    regrouper = regroup([0, 1, 2], 3)
    assert regrouper.choose([], 0.0) == [] and regrouper.counts.steps == 0
    assert regrouper.choose([2, 0], 0.0) == [2, 0]
    assert regroup([0, 1, 2], 3, "batch").choose([2, 1, 0], 0.0) == [2, 1, 0]


def test_requests_that_need_the_same_are_admitted_first_but_nobody_waits_for_many() -> None:
    paths = Paths(4, 1, 4)
    for slot in range(3):
        paths.note_prompt(slot, ids_of([slot]))
    regrouper = make_regrouper(paths, 1, "batch", admit_window=3)
    assert regrouper.admit([10, 11, 12], [1, 2, 0], [0]) == 2
    assert regrouper.counts.overtaken == 2
    assert regrouper.admit([10, 11, 13], [1, 2, 0], [0]) == 2
    assert regrouper.admit([10, 11, 14], [1, 2, 0], [0]) == 0  # two went before it
    regrouper.forget(10)
    assert regrouper.admit([11, 14], [1, 0], [0]) == 0  # so they did before this one
    assert regrouper.admit([20, 21], [None, 0], [0]) == 0
    assert regrouper.admit([20, 21, 22], [1, None, 0], [0]) == 0
    assert regrouper.admit([20, 21], [1, 0], []) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("granularity", "layer"), ("quantum", 0), ("quantum", 2000), ("timeout_ms", 0.5), ("timeout_ms", float("nan")),
        ("timeout_ms", 1e6), ("ageing", -1.0), ("min_batch", 0), ("admit_window", 0), ("admit_window", 1000),
    ],
)  # fmt: skip
def test_impossible_knobs_are_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{name}.*{value}"):
        dataclasses.replace(RegroupingOptions(), **{name: value}).check()


class Regrouping(RuleBasedStateMachine):
    """Sequences come and go at any time; every step is checked."""

    @initialize(
        slots=st.integers(1, 9),
        granularity=st.sampled_from(["batch", "sequence", "token"]),
        quantum=st.integers(1, 5),
        timeout=st.sampled_from([1.0, 20.0, NEVER]),
        ageing=st.sampled_from([0.0, 50.0]),
        min_batch=st.integers(1, 4),
        capacity=st.integers(1, 24),
    )
    def begin(
        self, slots: int, granularity: str, quantum: int, timeout: float, ageing: float, min_batch: int, capacity: int
    ) -> None:
        self.options = RegroupingOptions(granularity, quantum, timeout, ageing, min_batch)
        self.paths = Paths(slots, 2, 12)
        self.regrouper = Regrouper(self.options, self.paths, capacity)
        self.now, self.running = 0.0, []
        self.free = list(range(slots))
        self.out: dict[int, int] = {}  # steps in a row that a sequence was left out
        self.since: dict[int, float] = {}
        self.given = self.taken = self.forced = 0

    @precondition(lambda self: self.free)
    @rule(choice=st.randoms(use_true_random=False), length=st.integers(0, 3))
    def start(self, choice: Any, length: int) -> None:
        slot = self.free.pop(choice.randrange(len(self.free)))
        self.regrouper.begin(slot, choice.randrange(len(self.paths.likely)), length)
        if choice.random() < 0.9:  # else nothing is known of it
            self.paths.note_prompt(slot, self.draw_ids(choice, 5))
        self.running.append(slot)
        self.out[slot] = 0

    @precondition(lambda self: self.running)
    @rule(choice=st.randoms(use_true_random=False))
    def end(self, choice: Any) -> None:
        slot = self.running.pop(choice.randrange(len(self.running)))
        self.regrouper.end(slot)
        self.since.pop(slot, None)
        del self.out[slot]
        self.free.append(slot)

    @rule(choice=st.randoms(use_true_random=False), seconds=st.sampled_from([0.0, 0.0, 0.004, 0.03]))
    def step(self, choice: Any, seconds: float) -> None:
        self.now += seconds
        chosen = self.regrouper.choose(self.running, self.now)
        assert chosen == [slot for slot in self.running if slot in chosen]  # in order, each once, no others
        assert len(chosen) >= min(self.options.min_batch, len(self.running))
        if self.options.granularity == "batch" or len(self.running) <= FEW:
            assert chosen == self.running
        late = {slot for slot, since in self.since.items() if 1e3 * (self.now - since) > self.options.timeout_ms}
        assert late <= set(chosen)
        if self.options.groups and len(self.running) > FEW:
            self.forced += len(late)
        assert self.regrouper.counts.forced == self.forced
        for slot in self.running:
            self.out[slot] = 0 if slot in chosen else self.out[slot] + 1
            if slot in chosen:
                self.since.pop(slot, None)
            else:
                self.since.setdefault(slot, self.now)
        self.given += len(self.running)
        self.taken += len(chosen)
        if chosen:
            self.paths.note_tokens(chosen, self.draw_ids(choice, len(chosen)))

    @invariant()
    def nobody_starves(self) -> None:
        if hasattr(self, "out"):
            most = len(self.paths.likely) * (self.options.quantum if self.options.granularity == "sequence" else 1)
            assert all(steps < most for steps in self.out.values())
            assert self.regrouper.counts.left_out == self.given - self.taken
            assert (self.paths.likely >= 0).all() and (self.paths.likely <= 1 + 1e-5).all()

    def draw_ids(self, choice: Any, tokens: int) -> Any:
        return np.array([[choice.sample(range(12), 2) for _ in range(tokens)] for _ in range(2)])


TestRegrouping = Regrouping.TestCase
TestRegrouping.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
