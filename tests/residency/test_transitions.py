"""State machine: wanted sets, slow and failing copies, windows that stay open; the invariants hold throughout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dynaexq.core import ExpertKey, ExpertShape, ModelShape, OptionError, Residency, StoreError, decode_handle
from dynaexq.device import CpuDevice
from dynaexq.device.fake import FakeCopyEngine
from dynaexq.formats import ExpertFormat, VersionLayout, tier_format
from dynaexq.residency import BudgetTracker
from dynaexq.residency.layout import PoolPlan
from dynaexq.residency.transitions import RateLimit, TransitionPipeline
from dynaexq.residency.versions import HIGH, LOW, VersionedExperts, load_versions

SHAPE = ModelShape(2, 4, ExpertShape(64, 32))
TIERS = ("int4", "int2")
NESTED = ("int2+2", "int2")
POISON = 0xEE


def pattern(key: ExpertKey, tier: str) -> int:
    return 1 + SHAPE.index(key) + 100 * (tier == "int2")


class PatternSource:
    """Versions whose every byte says which version they are."""

    shape = SHAPE
    fingerprint = "patterns"

    def format(self, tier: str) -> ExpertFormat:
        return tier_format(tier, 32)

    def read_into(self, key: ExpertKey, tier: str, destination: Any) -> None:
        destination[:] = pattern(key, tier)

    def missing_files(self) -> list[str]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing is open."""


def build(capacity: list[int], keep_low: bool, spare: int = 1, tiers: tuple[str, str] = TIERS) -> VersionedExperts:
    source, slots = PatternSource(), np.array(capacity)
    sizes = [VersionLayout.of(source.format(tier), SHAPE.expert).extent_bytes for tier in tiers]
    total, high = SHAPE.layers * SHAPE.experts, int(slots.sum())
    low_blocks = total if keep_low else total - high + min(spare, high)
    experts = VersionedExperts(
        source, tiers, PoolPlan(slots, *sizes, low_blocks, keep_low), CpuDevice(), BudgetTracker(1 << 24)
    )
    experts.arena.host_view(0, experts.arena.nbytes)[:] = POISON
    mask = np.arange(SHAPE.experts) < slots[:, None]
    load_versions(experts, source, tiers, mask, lambda *_: None)
    return experts


class Pipeline(RuleBasedStateMachine):
    @initialize(
        capacity=st.lists(st.integers(0, 4), min_size=2, max_size=2),
        layout=st.sampled_from(["replace", "keep", "nested"]),
        in_flight=st.integers(1, 3),
        rate=st.sampled_from([None, 5e4]),
        spare=st.integers(1, 2),
    )
    def start(self, capacity: list[int], layout: str, in_flight: int, rate: float | None, spare: int) -> None:
        self.tiers = NESTED if layout == "nested" else TIERS
        self.experts = build(capacity, layout != "replace", spare, self.tiers)
        self.budget = self.experts._budget
        self.engine = FakeCopyEngine()
        self.reports: list[str] = []
        self.pipeline = TransitionPipeline(
            self.experts, PatternSource(), self.tiers, self.engine, RateLimit(rate, in_flight), self.reports.append
        )
        self.in_flight, self.most = in_flight, np.array(capacity)
        self.now = 0.0
        self.windows: list[tuple[Any, Any, list[int]]] = []
        self.random = np.random.default_rng(0)

    @rule(seed=st.integers(0, 1000))
    def want(self, seed: int) -> None:
        scores = np.random.default_rng(seed).random((SHAPE.layers, SHAPE.experts))
        wanted = np.zeros(scores.shape, bool)
        for layer, slots in enumerate(self.experts.capacity):
            wanted[layer, np.argsort(-scores[layer])[: int(slots)]] = True
        self.pipeline.want(wanted, scores)

    @rule(shares=st.lists(st.integers(0, 4), min_size=2, max_size=2))
    def resize(self, shares: list[int]) -> None:
        self.pipeline.border.want(np.minimum(shares, self.most))

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 100.0]))
    def step(self, seconds: float) -> None:
        self.now += seconds
        self.pipeline.step(self.now)

    @rule(data=st.data(), fails=st.booleans())
    def end_a_copy(self, data: st.DataObject, fails: bool) -> None:
        if self.engine.running:
            ticket = data.draw(st.sampled_from(sorted(self.engine.running)))
            self.engine.end(ticket, StoreError("the disk is gone") if fails else None)

    @rule()
    def open_window(self) -> None:
        if len(self.windows) < 4:
            window, words = self.experts.handles.pin()
            self.windows.append((window, words, words.tolist()))

    @rule(data=st.data())
    def close_window(self, data: st.DataObject) -> None:
        if self.windows:
            window, *_ = self.windows.pop(data.draw(st.integers(0, len(self.windows) - 1)))
            self.experts.handles.release(window)

    @invariant()
    def every_window_reads_complete_versions(self) -> None:
        if not hasattr(self, "experts"):
            return
        self.experts.check_integrity()
        for pool in self.experts.pools:  # whatever is free may be overwritten at any time
            for offset in pool.free_offsets:
                self.experts.arena.host_view(offset, pool.block_bytes)[:] = POISON
        now = self.experts.handles.pin()
        for _, words, pinned in [*self.windows, (*now, now[1].tolist())]:
            assert words.tolist() == pinned
            for key in SHAPE.expert_keys():
                handle = decode_handle(int(words[SHAPE.index(key)]))
                block = self.experts.block(handle).numpy()
                if handle.residual is None:
                    assert (block == pattern(key, self.tiers[handle.format_index])).all()
                else:  # the low version is read, and what is nested in it
                    rest = self.experts.arena.host_view(handle.residual, self.experts.pools[HIGH].block_bytes)
                    assert (block == pattern(key, self.tiers[LOW])).all()
                    assert (rest == pattern(key, self.tiers[HIGH])).all()
        self.experts.handles.release(now[0])
        assert len(self.engine.running) <= self.in_flight
        assert len(self.reports) == self.pipeline.counters.failed

    def teardown(self) -> None:
        """Liveness: once windows close and copies succeed, the last wish comes true."""
        if not hasattr(self, "experts"):
            return
        for window, *_ in self.windows:
            self.experts.handles.release(window)
        self.windows = []
        self.settle()
        for capacity in (np.zeros_like(self.most), self.most):
            self.pipeline.border.want(capacity)
            self.settle()
        self.every_window_reads_complete_versions()

    def settle(self) -> None:
        """Copies succeed until nothing is left to do."""
        self.want(7)
        for _ in range(200):
            self.now += 100.0
            self.pipeline.step(self.now)
            for ticket in list(self.engine.running):
                self.engine.end(ticket)
            if self.pipeline.idle:
                break
        assert self.pipeline.idle
        scores = np.random.default_rng(7).random((SHAPE.layers, SHAPE.experts))
        for layer, slots in enumerate(self.experts.capacity):
            hottest = set(np.argsort(-scores[layer])[: int(slots)])
            assert set(np.flatnonzero(self.experts.high_mask()[layer])) == hottest
        high, low = (self.experts.layouts[pool].extent_bytes for pool in (HIGH, LOW))
        given_up = int(self.most.sum() - self.experts.capacity.sum())
        each = high if self.experts.keep_low else high - low
        assert self.experts.expert_bytes == self.experts.arena.nbytes - given_up * each == self.budget.used


TestPipeline = Pipeline.TestCase
TestPipeline.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_a_limit_that_stops_everything_is_refused() -> None:
    with pytest.raises(OptionError, match="no version could ever move"):
        RateLimit(0.0).check()
    with pytest.raises(OptionError):
        RateLimit(None, 0).check()


def wish(*high: int) -> tuple[Any, Any]:
    """A wanted set for layer 0, and scores that fit it."""
    wanted = np.zeros((SHAPE.layers, SHAPE.experts), bool)
    wanted[0, list(high)] = True
    return wanted, wanted.astype(float)


def test_a_wish_taken_back_while_its_copy_runs_still_comes_true() -> None:
    experts, engine = build([3, 0], keep_low=False), FakeCopyEngine()
    pipeline = TransitionPipeline(experts, PatternSource(), TIERS, engine, RateLimit(), lambda _: None)
    pipeline.want(*wish(0, 1, 3))
    pipeline.step(0.0)  # expert 2 is on its way down
    pipeline.want(*wish(0, 1, 2))
    for _ in range(10):
        for ticket in list(engine.running):
            engine.end(ticket)
        pipeline.step(0.0)
    assert pipeline.idle
    assert set(np.flatnonzero(experts.high_mask()[0])) == {0, 1, 2}


def test_a_failed_copy_nobody_wants_any_more_is_not_tried_again() -> None:
    experts, engine = build([3, 0], keep_low=True), FakeCopyEngine()
    pipeline = TransitionPipeline(experts, PatternSource(), TIERS, engine, RateLimit(), lambda _: None)
    pipeline.want(*wish(0, 1, 3))
    pipeline.step(0.0)
    pipeline.step(0.0)  # expert 3 is on its way up
    pipeline.want(*wish(0, 1))
    (ticket,) = engine.running
    engine.end(ticket, StoreError("the disk is gone"))
    pipeline.step(0.0)
    pipeline.step(100.0)
    assert pipeline.idle and not engine.running and pipeline.counters.failed == 1


@given(seed=st.integers(0, 10_000), spare=st.integers(1, 2))
@settings(max_examples=60)
def test_a_way_leads_from_any_recorded_map_to_the_next(seed: int, spare: int) -> None:
    """Maps of a run in exchange: as many high as the plan has, or fewer by up to the spare blocks."""
    random, experts = np.random.default_rng(seed), build([2, 2], keep_low=False, spare=spare)
    experts.shares_by_layer = False
    engine = FakeCopyEngine()
    pipeline = TransitionPipeline(experts, PatternSource(), TIERS, engine, RateLimit(), lambda _: None)
    for _ in range(6):
        wanted = np.zeros((SHAPE.layers, SHAPE.experts), bool)
        for layer, slots in enumerate(experts.capacity):
            wanted[layer, random.permutation(SHAPE.experts)[: int(slots)]] = True
        for place in random.permutation(np.flatnonzero(wanted))[: random.integers(0, spare + 1)]:
            wanted.ravel()[place] = False
        pipeline.want(wanted, random.random(wanted.shape))
        for _ in range(30):
            pipeline.step(0.0)
            for ticket in list(engine.running):
                engine.end(ticket)
        assert np.array_equal(experts.high_mask(), wanted)
        experts.check_integrity()


@pytest.mark.parametrize("keep_low", [False, True])
def test_illegal_moves_are_caught(keep_low: bool) -> None:
    experts = build([3, 2], keep_low)
    moving, resting = ExpertKey(0, 3), ExpertKey(0, 0)
    for misuse in (experts.finish, experts.abandon):
        with pytest.raises(AssertionError):
            misuse(resting)
    experts.entries[moving].state = Residency.EVICTING
    with pytest.raises(AssertionError, match="EVICTING -> PROMOTING is no legal move"):
        experts._move(experts.entries[moving], Residency.PROMOTING)
