"""From a version source to a running ExpertRuntime, mode by mode: same arena, handles, kernel and budget in all."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dynaexq.control import ControlLoop
from dynaexq.core import ExpertKey, StoreError
from dynaexq.device import CpuDevice
from dynaexq.device.copies import ThreadCopyEngine
from dynaexq.formats import VersionLayout
from dynaexq.kernels import ExpertsKernel, VersionMemory, make_kernel
from dynaexq.policy import Hotness, HotnessOptions, pick_hottest
from dynaexq.policy.hotness import Scores
from dynaexq.residency import BudgetTracker, ResidentExperts, VersionSource
from dynaexq.residency.layout import PoolPlan, choose_layout, plan_pools
from dynaexq.residency.transitions import TransitionPipeline
from dynaexq.residency.versions import VersionedExperts, load_versions
from dynaexq.runtime import ExpertRuntime
from dynaexq.traffic import TrafficMeter, TrafficProfile, check_state_file
from dynaexq.traffic.version_map import MapHead, MapRecorder, RecordedMap, check_map_file
from dynaexq.tuning import Tuning

REPORT_SECONDS = 30.0
LoadProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Serving:
    """What every mode needs."""

    mode: str
    source: VersionSource
    budget: BudgetTracker
    kernel: str
    activations: str
    progress: LoadProgress


@dataclass(frozen=True)
class Adaptive:
    """How versions move.

    Args:
        tiers: (high, low).
        expert_memory: bytes of both pools.
        drive: see control.py.
        state: traffic profile that is read at the start, if there, and kept up to date: hotness over restarts.
        ranking: traffic profile for a first start without state.
        record: version map to write.
        replay: version map to follow, with the drive `recorded`.
    """

    tiers: tuple[str, str]
    expert_memory: int
    drive: str = "thread"
    tuning: Tuning = field(default_factory=Tuning)
    state: Path | None = None
    ranking: Path | None = None
    record: Path | None = None
    replay: Path | None = None


def serve_uniform(serving: Serving, tier: str) -> ExpertRuntime:
    """Every expert at `tier`. Raises StoreError, CheckpointError or MemoryLimitError."""
    return _serve_resident(serving, dict.fromkeys(serving.source.shape.expert_keys(), tier))


def serve_map(serving: Serving, tiers: tuple[str, str], expert_memory: int, profile: Path) -> ExpertRuntime:
    """The experts that `profile` says are hottest at the high tier for good, the others at the low one.

    Raises:
        StoreError: the profile is damaged or of another model; see serve_uniform.
    """
    source = serving.source
    loaded = TrafficProfile.load(profile, source.fingerprint, source.shape)
    plan = plan_for(source, tiers, expert_memory, "replace", 0)
    high = pick_hottest(loaded.sums, plan.capacity)
    runtime = _serve_resident(serving, {key: tiers[0 if high[key] else 1] for key in source.shape.expert_keys()})
    runtime.listener = TrafficMeter(source.shape)
    return runtime


def serve_adaptive(serving: Serving, adaptive: Adaptive) -> ExpertRuntime:
    """Router traffic decides which experts are high.

    Raises:
        StoreError: the ranking, or a version map to follow, is damaged or of another model; see serve_uniform. Such a
            state is only warned of.
    """
    source, tuning, tiers = serving.source, adaptive.tuning, adaptive.tiers
    if adaptive.state is not None:
        check_state_file(adaptive.state)
    options = tuning.control(adaptive.drive)
    known, before = _read_hotness(adaptive, source, options.hotness)
    plan = plan_for(source, tiers, adaptive.expert_memory, tuning.layout, tuning.spare)
    recorded = RecordedMap.load(adaptive.replay, source.fingerprint, tiers, source.shape) if adaptive.replay else None
    if recorded:
        recorded.check_capacity(plan.capacity)
    experts = VersionedExperts(source, tiers, plan, CpuDevice(), serving.budget)
    link = load_versions(experts, source, tiers, pick_hottest(known.scores, plan.capacity), serving.progress)
    experts.shares_by_layer = recorded is None
    wake = threading.Event()
    engine = ThreadCopyEngine(wake.set, tuning.link_bytes_per_second)
    report = FailureReport()
    pipeline = TransitionPipeline(experts, source, tiers, engine, tuning.rate(adaptive.drive, link), report)
    save = StateSaver(adaptive.state, source.fingerprint, tuning.signal, before).save if adaptive.state else None
    record = None
    if adaptive.record is not None:
        check_map_file(adaptive.record)
        slots, shape = plan.capacity.tolist(), source.shape
        head = MapHead(
            fingerprint=source.fingerprint, tiers=tiers, layers=shape.layers, experts=shape.experts, capacity=slots
        )
        record = MapRecorder(adaptive.record, head)
    control = ControlLoop(experts, pipeline, options, wake, save, record, recorded)
    control.hotness.restore(known.sums)
    control.start()
    runtime = ExpertRuntime(serving.mode, experts, _make_kernel(serving, experts), serving.budget, control)
    weakref.finalize(runtime, control.close)  # when the model is dropped, or at exit: threads end, hotness is kept
    return runtime


class FailureReport:
    """Warns of failed transitions, now and then: a disk that is gone fails them all."""

    def __init__(self) -> None:
        self._next, self._untold = 0.0, 0

    def __call__(self, text: str) -> None:
        """One more."""
        now = time.monotonic()
        if now < self._next:
            self._untold += 1
            return
        more = f" (and {self._untold} more since the last report)" if self._untold else ""
        warnings.warn(text + more, stacklevel=2)
        self._next, self._untold = now + REPORT_SECONDS, 0


class StateSaver:
    """Writes hotness to a file."""

    def __init__(self, path: Path, fingerprint: str, signal: str, before: int) -> None:
        """`before` router selections were counted in earlier runs."""
        self._before = before
        self._path = path.resolve()  # a link stays a link, and what it points to is replaced
        self._fingerprint = fingerprint
        self._signal = signal

    def save(self, sums: Scores, routed: int) -> None:
        """Replace the file by hotness [layers, experts] from `routed` router selections. Raises StoreError."""
        TrafficProfile.of(self._fingerprint, self._signal, sums, self._before + routed, []).save(self._path)


def plan_for(
    source: VersionSource, tiers: tuple[str, str], expert_memory: int, layout: str | None, spare: int | None
) -> PoolPlan:
    """Pools of (high, low) versions of `source` within `expert_memory` bytes. Raises OptionError, see choose_layout."""
    high, low = (VersionLayout.of(source.format(tier), source.shape.expert).extent_bytes for tier in tiers)
    return plan_pools(source.shape, high, low, expert_memory, choose_layout(layout, tiers, spare), spare)


def _serve_resident(serving: Serving, tiers: Mapping[ExpertKey, str]) -> ExpertRuntime:
    experts = ResidentExperts(serving.source, tiers, CpuDevice(), serving.budget)
    try:
        experts.load(serving.progress)
    finally:
        serving.source.close()
    return ExpertRuntime(serving.mode, experts, _make_kernel(serving, experts), serving.budget, None)


def _make_kernel(serving: Serving, experts: VersionMemory) -> ExpertsKernel:
    return make_kernel(serving.kernel, experts, serving.activations)


def _read_hotness(adaptive: Adaptive, source: VersionSource, options: HotnessOptions) -> tuple[Hotness, int]:
    """Hotness to start from, and the router selections behind it: the state's, else the ranking's, else none.

    A ranking counts as little traffic (one selection per expert), so that the first real traffic can overrule it.
    """
    shape, signal = source.shape, adaptive.tuning.signal
    hotness = Hotness(shape.layers, shape.experts, options)
    if adaptive.ranking is not None:
        hotness.restore(TrafficProfile.load(adaptive.ranking, source.fingerprint, shape).sums)
        hotness.restore(hotness.scores)
    if adaptive.state is not None and adaptive.state.exists():
        try:
            state = TrafficProfile.load(adaptive.state, source.fingerprint, shape)
            if state.signal != signal:
                raise StoreError(f"{adaptive.state} holds the signal {state.signal}, not {signal}")
            hotness.restore(state.sums)
            return hotness, state.routed
        except StoreError as error:
            warnings.warn(f"{error}; it is ignored, and replaced as traffic comes", stacklevel=2)
    return hotness, 0
