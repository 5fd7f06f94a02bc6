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
from dynaexq.formats import TIERS as ALL_TIERS
from dynaexq.formats import ExpertFormat, VersionLayout, tier_format
from dynaexq.residency import BudgetTracker
from dynaexq.residency.layout import PoolPlan, share_spare
from dynaexq.residency.resizing import PoolBorder
from dynaexq.residency.transitions import RateLimit, TransitionPipeline
from dynaexq.residency.versions import VersionedExperts, load_versions

SHAPE = ModelShape(2, 4, ExpertShape(64, 32))
TIERS = ("int4", "int2")
LADDER = ("int8", "int4", "int3", "int2")
NESTED = ("int2+2", "int2")
POISON = 0xEE


def pattern(key: ExpertKey, tier: str) -> int:
    return 1 + SHAPE.index(key) + 10 * list(ALL_TIERS).index(tier)


class PatternSource:
    """Versions whose every byte says which version they are."""

    shape = SHAPE
    fingerprint = "patterns"

    def format(self, tier: str) -> ExpertFormat:
        return tier_format(tier, 32)

    def require_tier(self, tier: str) -> None:
        """All are there."""

    def read_into(self, key: ExpertKey, tier: str, destination: Any) -> None:
        destination[:] = pattern(key, tier)

    def missing_files(self) -> list[str]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing is open."""


def build(slots: list[int], keep_low: bool = False, spare: int = 1, tiers: tuple[str, ...] = TIERS) -> VersionedExperts:
    """Experts whose first ones fill the slots of each tier from the highest down."""
    source = PatternSource()
    sizes = tuple(VersionLayout.of(source.format(tier), SHAPE.expert).extent_bytes for tier in tiers)
    total = SHAPE.layers * SHAPE.experts
    more = share_spare(spare if any(slots) and not keep_low else 0, len(tiers))
    counts = [*slots, total if keep_low else total - sum(slots)]
    blocks = tuple(count + extra for count, extra in zip(counts, more, strict=True))
    plan = PoolPlan(sizes, tuple(slots), blocks, keep_low)
    experts = VersionedExperts(source, tiers, plan, CpuDevice(), BudgetTracker(1 << 24))
    experts.arena.host_view(0, experts.arena.nbytes)[:] = POISON
    load_versions(experts, source, fill(np.arange(total), slots), lambda *_: None)
    return experts


def fill(order: Any, slots: Any) -> Any:
    """Levels [layers, experts]: the first of `order` at the highest tier as far as its slots go, and so on."""
    levels = np.full(order.size, len(slots), np.int8)
    start = 0
    for level, count in enumerate(slots):
        levels[order[start : start + count]] = level
        start += count
    return levels.reshape(SHAPE.layers, SHAPE.experts)


def make_pipeline(
    experts: VersionedExperts, engine: FakeCopyEngine, limit: RateLimit | None = None, report: Any = lambda _: None
) -> TransitionPipeline:
    return TransitionPipeline(experts, PatternSource(), PoolBorder(experts), engine, limit or RateLimit(), report)


class Pipeline(RuleBasedStateMachine):
    @initialize(
        slots=st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(lambda slots: sum(slots) <= 7),
        layout=st.sampled_from(["replace", "keep", "nested", "ladder"]),
        in_flight=st.integers(1, 3),
        rate=st.sampled_from([None, 5e4]),
        spare=st.integers(1, 4),
    )
    def start(self, slots: list[int], layout: str, in_flight: int, rate: float | None, spare: int) -> None:
        self.tiers = {"nested": NESTED, "ladder": LADDER}.get(layout, TIERS)
        self.most = slots if layout == "ladder" else [sum(slots)]
        self.experts = build(self.most, layout in ("keep", "nested"), spare, self.tiers)
        self.budget = self.experts._budget
        self.engine = FakeCopyEngine()
        self.reports: list[str] = []
        self.pipeline = make_pipeline(self.experts, self.engine, RateLimit(rate, in_flight), self.reports.append)
        self.in_flight = in_flight
        self.now = 0.0
        self.windows: list[tuple[Any, Any, list[int]]] = []
        self.random = np.random.default_rng(0)

    @rule(seed=st.integers(0, 1000))
    def want(self, seed: int) -> None:
        self.wanted = fill(np.random.default_rng(seed).permutation(8), self.pipeline.border.wanted)
        self.pipeline.want(self.wanted, np.random.default_rng(seed).random((SHAPE.layers, SHAPE.experts)))

    @rule(shares=st.lists(st.integers(0, 4), min_size=3, max_size=3))
    def resize(self, shares: list[int]) -> None:
        self.pipeline.border.want(tuple(min(*pair) for pair in zip(shares, self.most, strict=False)))

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
                    rest = self.experts.arena.host_view(handle.residual, self.experts.pools[0].block_bytes)
                    assert (block == pattern(key, self.tiers[1])).all()
                    assert (rest == pattern(key, self.tiers[0])).all()
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
        for slots in ([0] * len(self.most), self.most):
            self.pipeline.border.want(tuple(slots))
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
        assert np.array_equal(self.experts.levels(), self.wanted)
        *above, low = (layout.extent_bytes for layout in self.experts.layouts)
        freed = sum(
            (most - now) * (size - (0 if self.experts.keep_low else low))
            for most, now, size in zip(self.most, self.pipeline.border.wanted, above, strict=True)
        )
        assert self.experts.expert_bytes == self.experts.arena.nbytes - freed == self.budget.used
        assert self.pipeline.border.wanted_bytes == self.experts.expert_bytes


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
    """Wanted levels for layer 0, and gains that fit them."""
    wanted = np.ones((SHAPE.layers, SHAPE.experts), np.int8)
    wanted[0, list(high)] = 0
    return wanted, 1.0 - wanted


def test_a_wish_taken_back_while_its_copy_runs_still_comes_true() -> None:
    experts, engine = build([3]), FakeCopyEngine()
    pipeline = make_pipeline(experts, engine)
    pipeline.want(*wish(0, 1, 3))
    pipeline.step(0.0)  # expert 2 is on its way down
    pipeline.want(*wish(0, 1, 2))
    for _ in range(10):
        for ticket in list(engine.running):
            engine.end(ticket)
        pipeline.step(0.0)
    assert pipeline.idle
    assert np.flatnonzero(experts.levels()[0] == 0).tolist() == [0, 1, 2]


def test_a_failed_copy_nobody_wants_any_more_is_not_tried_again() -> None:
    experts, engine = build([3], keep_low=True), FakeCopyEngine()
    pipeline = make_pipeline(experts, engine)
    pipeline.want(*wish(0, 1, 3))
    pipeline.step(0.0)
    pipeline.step(0.0)  # expert 3 is on its way up
    pipeline.want(*wish(0, 1))
    (ticket,) = engine.running
    engine.end(ticket, StoreError("the disk is gone"))
    pipeline.step(0.0)
    pipeline.step(100.0)
    assert pipeline.idle and not engine.running and pipeline.counters.failed == 1


@given(
    seed=st.integers(0, 10_000),
    slots=st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(lambda slots: 0 < sum(slots) <= 7),
)
@settings(max_examples=100)
def test_a_way_leads_from_any_map_to_any_other(seed: int, slots: list[int]) -> None:
    """Maps of a run in exchange may have fewer at a tier than its slots, by the spare blocks below."""
    random = np.random.default_rng(seed)
    experts = build(slots, tiers=LADDER[-len(slots) - 1 :])
    engine = FakeCopyEngine()
    pipeline = make_pipeline(experts, engine)
    for _ in range(6):
        wanted = fill(random.permutation(8), slots)
        raised = np.flatnonzero(wanted < len(slots))
        wanted.ravel()[random.permutation(raised)[: random.integers(0, 2)]] = len(slots)
        go_to(wanted, pipeline, engine)
        assert np.array_equal(experts.levels(), wanted)
        experts.check_integrity()


def go_to(levels: Any, pipeline: TransitionPipeline, engine: FakeCopyEngine) -> None:
    """As far as there is a way."""
    pipeline.want(levels, np.random.default_rng(0).random(levels.shape))
    for _ in range(60):
        pipeline.step(0.0)
        for ticket in list(engine.running):
            engine.end(ticket)


@pytest.mark.parametrize("keep_low", [False, True])
def test_illegal_moves_are_caught(keep_low: bool) -> None:
    experts = build([3], keep_low)
    moving, resting = ExpertKey(0, 3), ExpertKey(0, 0)
    for misuse in (experts.finish, experts.abandon):
        with pytest.raises(AssertionError):
            misuse(resting)
    experts.entries[moving].state = Residency.EVICTING
    with pytest.raises(AssertionError, match="EVICTING -> PROMOTING is no legal move"):
        experts._move(experts.entries[moving], Residency.PROMOTING)
