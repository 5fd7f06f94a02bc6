"""A simulated run from what is asked for: tiers, bytes, knobs, a link and what passes take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dynaexq.assembly import Platform, assemble
from dynaexq.control import Extras
from dynaexq.core import MemoryLimitError, OptionError
from dynaexq.device.virtual import VirtualClock, VirtualDevice, VirtualLink, VirtualWake
from dynaexq.formats import VersionLayout, tier_format, tier_rank
from dynaexq.formats.base import require_standing
from dynaexq.launch_options import ADAPTIVE
from dynaexq.plan.memory import cache_capacity, format_bytes
from dynaexq.plan.versions import plan_map, plan_versions
from dynaexq.policy.caching import CacheMap
from dynaexq.policy.hotness import Scores
from dynaexq.residency import BudgetTracker, VersionSource
from dynaexq.residency.versions import Levels, VersionedExperts, place_versions, settle_versions
from dynaexq.serving import known_hotness, make_map_recorder
from dynaexq.simulate.cache import CACHES, SimulatedCache, make_policy
from dynaexq.simulate.costs import StepCosts
from dynaexq.simulate.feed import Block
from dynaexq.simulate.run import Moving, Simulation
from dynaexq.simulate.traffic import SimulatedTraffic
from dynaexq.traffic.profile import TrafficProfile
from dynaexq.tuning import make_tuning

MODES = ("static", "static-map", *ADAPTIVE, *CACHES)
DRIVES = ("thread", "replay")


@dataclass(frozen=True)
class SimulationOptions:
    """What to simulate.

    Args:
        mode: `static` at `tier`, `static-map` by `profile`, a mode that moves versions, or a cache (experts at `tier`).
        high, low: the highest and the lowest tier of those.
        expert_memory: bytes of expert versions.
        tune: values by knob (see tuning.py).
        drive: `thread`, or `replay` to update between passes, as `evaluate` does.
        link: bytes per second of copies; `latency`: seconds that each takes beside.
        drag: seconds by which a second of copies beside it makes a pass longer: on a CPU, copies take one of its cores.
        gaps: start no pass before it started when it was recorded.
        record: version map to write.
    """

    mode: str = "dynaexq"
    tier: str | None = None
    high: str | None = None
    low: str | None = None
    expert_memory: int | None = None
    tune: dict[str, Any] = field(default_factory=dict)
    drive: str = "thread"
    link: float = 1e9
    latency: float = 0.0
    drag: float = 0.0
    gaps: bool = False
    profile: Path | None = None
    record: Path | None = None

    def check(self) -> None:
        """Raise OptionError for unknown, missing or useless values."""
        if self.mode not in MODES:
            raise OptionError(f"unknown mode '{self.mode}' to simulate; known are {', '.join(MODES)}")
        if (self.tier is None) is (self.mode in ("static", *CACHES)):
            raise OptionError(f"--tier and --mode {' or '.join(('static', *CACHES))} go together")
        self._check_tiers()
        if (self.profile is None) is (self.mode == "static-map"):
            raise OptionError("--mode static-map and --map FILE (made by `dynaexq calibrate`) go together")
        self._check_useless()
        if self.record is not None and self.mode not in ADAPTIVE:
            raise OptionError(f"--record-map goes with --mode {' or '.join(ADAPTIVE)}, not '{self.mode}'")
        if not 0 <= self.drag <= 1:
            raise OptionError(f"a drag of {self.drag:g} is not in 0..1")
        if not self.link > 0 or not 0 <= self.latency < float("inf"):
            raise OptionError(f"a link of {self.link:g} bytes per second and {self.latency:g} s: no copy would end")
        if self.mode not in ("static", *CACHES):
            make_tuning(self.tune, self.moves, hysteresis=self.mode != "no-hysteresis")

    def _check_useless(self) -> None:
        moving = self.mode not in ("static", *CACHES)
        if self.mode != "static" and self.expert_memory is None:
            raise OptionError(f"--mode {self.mode} needs --expert-memory, the bytes that versions may take")
        if self.mode == "static" and self.expert_memory is not None:
            raise OptionError("--expert-memory does nothing with --mode static; leave it out")
        for name, value in (("--high", self.high), ("--low", self.low), ("--tune", self.tune or None)):
            if value is not None and not moving:
                raise OptionError(f"{name} does nothing with --mode {self.mode}; leave it out")
        copies = self.moves in ("thread", "blocking")
        if (self.drag and not copies) or (self.latency and not (copies or self.mode in CACHES)):
            raise OptionError(
                "--latency and --drag do nothing where versions stay or move between passes; leave them out"
            )
        if self.drive != "thread" and self.mode in CACHES:
            raise OptionError(f"--drive does nothing with --mode {self.mode}; leave it out")

    def _check_tiers(self) -> None:
        for tier in (self.tier, self.high, self.low):
            if tier is not None:
                tier_format(tier)
                if tier != self.high:
                    require_standing(tier)
        if self.high and self.low and tier_rank(self.high) <= tier_rank(self.low):
            raise OptionError(f"the high tier {self.high} is not above the low tier {self.low}")

    @property
    def moves(self) -> str:
        """What moves versions: the drive of the control loop, or the mode of a run in which none move."""
        return self.drive if self.mode in ("dynaexq", "no-hysteresis") else self.mode


def build(
    source: VersionSource, options: SimulationOptions, costs: StepCosts, ahead: Callable[[], Iterable[Block]]
) -> tuple[Simulation, Moving | None]:
    """A run that has not begun, and what moves versions in it; `ahead` gives its passes, to who must know them.

    Raises:
        OptionError, MemoryLimitError, SideFileError: it cannot be had.
    """
    options.check()
    clock = VirtualClock()
    cache = _make_cache(source, options, ahead) if options.mode in CACHES else None
    if options.mode in ADAPTIVE:
        moving = _make_moving(source, options, clock)
        experts = moving.control.experts
        sizes, levels = dict(zip(experts.tiers, experts.plan.sizes, strict=True)), experts.levels()
    else:
        moving = None
        tiers, levels = _settle(source, options)
        sizes = {tier: _size(source, tier) for tier in tiers}
    losses = _losses(source, sizes)
    return Simulation(clock, sizes, levels, costs, moving, options.gaps, losses, options.drag, cache), moving


def _make_cache(
    source: VersionSource, options: SimulationOptions, ahead: Callable[[], Iterable[Block]]
) -> SimulatedCache:
    assert options.tier is not None and options.expert_memory is not None
    shape, nbytes = source.shape, _size(source, options.tier)
    capacity = cache_capacity(shape, options.tier, nbytes, options.expert_memory)
    cache = CacheMap(shape.layers * shape.experts, capacity, make_policy(options.mode, shape, ahead))
    return SimulatedCache(shape, cache, nbytes, options.link, options.latency)


def _settle(source: VersionSource, options: SimulationOptions) -> tuple[tuple[str, ...], Levels]:
    """Tiers, and levels [layers, experts] for good."""
    shape = source.shape
    if options.tier is not None:
        return (options.tier,), np.zeros((shape.layers, shape.experts), np.int8)
    assert options.profile is not None
    (high, low), budget = _tiers(source, options), _budget(source, options)
    wish = make_tuning(options.tune, options.moves).wish(high, low)._replace(layout="replace", spare=0, shadow=False)
    traffic = TrafficProfile.load(options.profile, source.fingerprint, shape).sums
    return plan_map(shape, partial(_size, source), wish, budget, source.sensitivity, traffic)


def _make_moving(source: VersionSource, options: SimulationOptions, clock: VirtualClock) -> Moving:
    """The engine's own control loop over experts without bytes."""
    tuning = make_tuning(options.tune, options.moves, hysteresis=options.mode != "no-hysteresis")
    (high, low), budget = _tiers(source, options), _budget(source, options)
    plan = plan_versions(source.shape, partial(_size, source), tuning.wish(high, low), budget, source.sensitivity)
    if not plan.pools.raised:
        raise MemoryLimitError(
            f"all experts fit at {low} in {format_bytes(budget)}, but not one more at {high}; give more --expert-memory"
        )
    speed = min(options.link, tuning.link_bytes_per_second or float("inf"))
    link = VirtualLink(clock, float("inf") if options.moves == "replay" else speed, options.latency)
    wake, traffic = VirtualWake(clock, link), SimulatedTraffic(source.shape, len(plan.tiers))
    platform = Platform(VirtualDevice(), lambda: link, partial(_place, options.link), wake, clock, computes=False)
    control = assemble(
        source,
        plan,
        tuning,
        options.moves,
        known_hotness(source, tuning.hotness),
        platform,
        BudgetTracker(plan.pools.nbytes),
        _no_failures,
        Extras(traffic=traffic),
    )
    if options.record is not None:
        control.record_maps(make_map_recorder(options.record, source, plan))
    return Moving(control, link, wake, traffic)


def _losses(source: VersionSource, tiers: Iterable[str]) -> Scores | None:
    """What a selection loses at each of `tiers`, [tiers, layers, experts]; None where that is not known."""
    known = source.sensitivity
    if known is None:
        return None
    return np.stack([known.losses[:, :, known.tiers.index(tier)] for tier in tiers])


def _place(link: float, experts: VersionedExperts, levels: Levels) -> float:
    place_versions(experts, levels)
    settle_versions(experts)
    return link


def _no_failures(text: str) -> None:
    raise AssertionError(text)


def _size(source: VersionSource, tier: str) -> int:
    return VersionLayout.of(source.format(tier), source.shape.expert).extent_bytes


def _tiers(source: VersionSource, options: SimulationOptions) -> tuple[str, str]:
    """The highest and the lowest tier: those asked for, else those whose losses are known."""
    known = source.sensitivity.tiers if source.sensitivity else ()
    high = options.high or max(known, key=tier_rank, default=None)
    low = options.low or min(known, key=tier_rank, default=None)
    if high is None or low is None:
        raise OptionError(f"--mode {options.mode} needs --high and --low, or --store with a calibrated store")
    source.format(high), source.format(low)
    return high, low


def _budget(source: VersionSource, options: SimulationOptions) -> int:
    """Bytes for versions. Raises MemoryLimitError where they do not hold every expert at the low tier."""
    low, budget = _tiers(source, options)[1], options.expert_memory or 0
    floor = _size(source, low) * source.shape.layers * source.shape.experts
    if budget < floor:
        raise MemoryLimitError(
            f"the expert memory limit {format_bytes(budget)} is below the floor {format_bytes(floor)} ({floor} bytes: "
            f"all experts at {low}); raise --expert-memory or take a lower tier"
        )
    return budget
