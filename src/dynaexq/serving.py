"""From a version source to a running ExpertRuntime, mode by mode: same arena, handles, kernel and budget in all."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dynaexq.assembly import Platform, assemble
from dynaexq.control import Extras
from dynaexq.core import ExpertKey, StoreError
from dynaexq.device import CpuDevice
from dynaexq.device.copies import ThreadCopyEngine
from dynaexq.formats import VersionLayout
from dynaexq.kernels import ExpertsKernel, VersionMemory, make_kernel
from dynaexq.kernels.threads import keep_numpy_single
from dynaexq.plan.memory import cache_capacity, low_capacity
from dynaexq.plan.versions import VersionPlan, VersionWish, plan_map, plan_versions
from dynaexq.policy import Hotness, HotnessOptions
from dynaexq.policy.caching import FLOW
from dynaexq.policy.foresight import make_cache_mind, make_flow_mind
from dynaexq.policy.hotness import Scores
from dynaexq.policy.mixing import WAIT
from dynaexq.policy.prediction import Routers
from dynaexq.predictor.choice import pick_predictor
from dynaexq.residency import BudgetTracker, ResidentExperts, VersionSource
from dynaexq.residency.cache import CachedExperts
from dynaexq.residency.mixture import SecondTier
from dynaexq.residency.versions import load_versions
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
        tiers: the highest and the lowest.
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


@dataclass(frozen=True)
class Cached:
    """Some experts resident at `tier` in `expert_memory` bytes; for `expertflow` the name or file of a predictor, and
    the model's routers, where they can be had, and what becomes of misses where experts have versions at `low` too."""

    tier: str
    expert_memory: int
    tuning: Tuning
    predictor: str | None = None
    routers: Routers | None = None
    low: str | None = None
    miss_policy: str = WAIT


def serve_uniform(serving: Serving, tier: str) -> ExpertRuntime:
    """Every expert at `tier`. Raises StoreError, CheckpointError or MemoryLimitError."""
    return _serve_resident(serving, dict.fromkeys(serving.source.shape.expert_keys(), tier))


def serve_cached(serving: Serving, cached: Cached) -> ExpertRuntime:
    """As many experts as memory holds, others read when they are needed or before; the mode says who leaves.

    Raises:
        StoreError, CheckpointError, MemoryLimitError: versions cannot be read, or not one expert fits.
        OptionError: a predictor that cannot be had.
    """
    source, tier, tuning, shape = serving.source, cached.tier, cached.tuning, serving.source.shape
    source.require_tier(tier)
    second, room = None, cached.expert_memory
    if cached.low is not None:
        source.require_tier(cached.low)
        nbytes = _size(source, cached.low)
        count = low_capacity(shape, nbytes, room, tuning.low_share)
        second = SecondTier(cached.low, count, cached.miss_policy, tuning.mixing)
        room -= count * nbytes
    capacity = cache_capacity(shape, tier, _size(source, tier), room)
    make_mind = partial(make_cache_mind, serving.mode, shape, capacity)
    if serving.mode == FLOW:
        keep_numpy_single()
        make_predictor = pick_predictor(cached.predictor, cached.routers, shape, source.fingerprint)
        make_mind = partial(make_flow_mind, make_predictor, shape, capacity, tuning.foresight)
    link = tuning.link_bytes_per_second
    experts = CachedExperts(source, tier, make_mind, CpuDevice(), serving.budget, link, tuning.in_flight, second)
    runtime = ExpertRuntime(serving.mode, experts, _make_kernel(serving, experts), serving.budget, None)
    weakref.finalize(runtime, experts.stop)
    return runtime


def serve_map(
    serving: Serving, tiers: tuple[str, str], expert_memory: int, profile: Path, slots: str | None = None
) -> ExpertRuntime:
    """Every expert for good at the tier from `tiers[0]` down to `tiers[1]` that loses least under the traffic of
    `profile`, where calibration says what versions lose; else the hottest at the high tier, the others at the low one.

    Raises:
        StoreError: the profile is damaged or of another model; see serve_uniform.
    """
    source = serving.source
    shape = source.shape
    traffic = TrafficProfile.load(profile, source.fingerprint, shape).sums
    wish = VersionWish(*tiers, slots, "replace", 0)
    ladder, levels = plan_map(shape, partial(_size, source), wish, expert_memory, source.sensitivity, traffic)
    runtime = _serve_resident(serving, {key: ladder[levels[key]] for key in shape.expert_keys()})
    runtime.listener = TrafficMeter(shape, tiers=len(runtime.experts.formats))
    return runtime


def serve_adaptive(serving: Serving, adaptive: Adaptive) -> ExpertRuntime:
    """Router traffic decides at which tiers experts are.

    Raises:
        StoreError: the ranking, or a version map to follow, is damaged or of another model; see serve_uniform. Such a
            state is only warned of.
    """
    source, tuning, tiers = serving.source, adaptive.tuning, adaptive.tiers
    if adaptive.state is not None:
        check_state_file(adaptive.state)
    known, before = _read_hotness(adaptive, source, tuning.hotness)
    shape, losses = source.shape, source.sensitivity
    plan = plan_versions(shape, partial(_size, source), tuning.wish(*tiers), adaptive.expert_memory, losses)
    recorded = RecordedMap.load(adaptive.replay, source.fingerprint, plan.tiers, shape) if adaptive.replay else None
    if recorded:
        recorded.check_slots(plan.pools.slots)
    wake = threading.Event()
    platform = Platform(
        CpuDevice(),
        lambda: ThreadCopyEngine(wake.set, tuning.link_bytes_per_second),
        lambda experts, levels: load_versions(experts, source, levels, serving.progress),
        wake,
    )
    save = StateSaver(adaptive.state, source.fingerprint, tuning.signal, before).save if adaptive.state else None
    extras, report = Extras(save, recorded), FailureReport()
    control = assemble(source, plan, tuning, adaptive.drive, known, platform, serving.budget, report, extras)
    if adaptive.record is not None:
        control.record_maps(make_map_recorder(adaptive.record, source, plan))
    control.start()
    kernel = _make_kernel(serving, control.experts)
    runtime = ExpertRuntime(serving.mode, control.experts, kernel, serving.budget, control)
    weakref.finalize(runtime, control.close)  # when the model is dropped, or at exit: threads end, hotness is kept
    return runtime


def make_map_recorder(path: Path, source: VersionSource, plan: VersionPlan) -> MapRecorder:
    """What writes the map of every window of a run down. Raises OptionError where `path` cannot become its file."""
    check_map_file(path)
    head = MapHead(
        fingerprint=source.fingerprint,
        tiers=plan.tiers,
        layers=source.shape.layers,
        experts=source.shape.experts,
        slots=plan.pools.slots,
    )
    return MapRecorder(path, head)


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


def _size(source: VersionSource, tier: str) -> int:
    """Bytes of a version, padding included."""
    return VersionLayout.of(source.format(tier), source.shape.expert).extent_bytes


def _serve_resident(serving: Serving, tiers: Mapping[ExpertKey, str]) -> ExpertRuntime:
    for tier in set(tiers.values()):
        serving.source.require_tier(tier)
    experts = ResidentExperts(serving.source, tiers, CpuDevice(), serving.budget)
    try:
        experts.load(serving.progress)
    finally:
        serving.source.close()
    return ExpertRuntime(serving.mode, experts, _make_kernel(serving, experts), serving.budget, None)


def _make_kernel(serving: Serving, experts: VersionMemory) -> ExpertsKernel:
    return make_kernel(serving.kernel, experts, serving.activations)


def known_hotness(source: VersionSource, options: HotnessOptions) -> Hotness:
    """What calibration knows of hotness, as little traffic."""
    hotness = Hotness(source.shape.layers, source.shape.experts, options)
    if source.sensitivity is not None:
        hotness.restore(source.sensitivity.traffic)
        hotness.restore(hotness.scores)
    return hotness


def _read_hotness(adaptive: Adaptive, source: VersionSource, options: HotnessOptions) -> tuple[Hotness, int]:
    """Hotness to start from, and the router selections behind it: the state's, else the ranking's, else calibration's.

    A ranking counts as little traffic (one selection per expert), so that the first real traffic can overrule it.
    """
    shape, signal = source.shape, adaptive.tuning.signal
    hotness = known_hotness(source, options)
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
