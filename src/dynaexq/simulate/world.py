"""A simulated run from what is asked for: tiers, bytes, knobs, a link and what passes take."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from dynaexq.assembly import Platform, assemble
from dynaexq.control import Extras
from dynaexq.core import MemoryLimitError, OptionError
from dynaexq.device.virtual import VirtualClock, VirtualDevice, VirtualLink, VirtualWake
from dynaexq.formats import tier_rank
from dynaexq.launch_options import ADAPTIVE
from dynaexq.plan.memory import format_bytes
from dynaexq.plan.versions import plan_map, plan_versions
from dynaexq.policy.hotness import Scores
from dynaexq.policy.prediction import Routers
from dynaexq.residency import BudgetTracker, VersionSource
from dynaexq.residency.versions import Levels, VersionedExperts, place_versions, settle_versions
from dynaexq.serving import known_hotness, make_map_recorder
from dynaexq.simulate.cached import Ahead, make_cache
from dynaexq.simulate.costs import StepCosts
from dynaexq.simulate.options import CACHED, SimulationOptions
from dynaexq.simulate.run import Moving, Simulation
from dynaexq.simulate.trace_source import version_bytes
from dynaexq.simulate.traffic import SimulatedTraffic
from dynaexq.traffic.profile import TrafficProfile
from dynaexq.tuning import make_tuning


def build(
    source: VersionSource,
    options: SimulationOptions,
    costs: StepCosts,
    ahead: Ahead,
    routers: Routers | None = None,
) -> tuple[Simulation, Moving | None]:
    """A run that has not begun, and what moves versions in it; `ahead` gives its passes, to who must know them, and
    `routers` are the model's, for predictors that ask them.

    Raises:
        OptionError, MemoryLimitError, SideFileError: it cannot be had.
    """
    options.check()
    clock = VirtualClock()
    cache = make_cache(source, options, clock, ahead, routers) if options.mode in CACHED else None
    if options.mode in ADAPTIVE:
        moving = _make_moving(source, options, clock)
        experts = moving.control.experts
        sizes, levels = dict(zip(experts.tiers, experts.plan.sizes, strict=True)), experts.levels()
    else:
        moving = None
        tiers, levels = _settle(source, options)
        sizes = {tier: version_bytes(source, tier) for tier in tiers}
    losses = _losses(source, sizes)
    return Simulation(clock, sizes, levels, costs, moving, options.gaps, losses, options.drag, cache), moving


def _settle(source: VersionSource, options: SimulationOptions) -> tuple[tuple[str, ...], Levels]:
    """Tiers, and levels [layers, experts] for good."""
    shape = source.shape
    if options.tier is not None:
        return (options.tier,), np.zeros((shape.layers, shape.experts), np.int8)
    assert options.profile is not None
    (high, low), budget = _tiers(source, options), _budget(source, options)
    wish = make_tuning(options.tune, options.moves).wish(high, low)._replace(layout="replace", spare=0, shadow=False)
    traffic = TrafficProfile.load(options.profile, source.fingerprint, shape).sums
    return plan_map(shape, partial(version_bytes, source), wish, budget, source.sensitivity, traffic)


def _make_moving(source: VersionSource, options: SimulationOptions, clock: VirtualClock) -> Moving:
    """The engine's own control loop over experts without bytes."""
    tuning = make_tuning(options.tune, options.moves, hysteresis=options.mode != "no-hysteresis")
    (high, low), budget = _tiers(source, options), _budget(source, options)
    plan = plan_versions(
        source.shape, partial(version_bytes, source), tuning.wish(high, low), budget, source.sensitivity
    )
    if not plan.pools.raised:
        raise MemoryLimitError(
            f"all experts fit at {low} in {format_bytes(budget)}, but not one more at {high}; give more --expert-memory"
        )
    speed = float("inf") if options.moves == "replay" else options.speed(tuning)
    link = VirtualLink(clock, speed, options.latency)
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
    floor = version_bytes(source, low) * source.shape.layers * source.shape.experts
    if budget < floor:
        raise MemoryLimitError(
            f"the expert memory limit {format_bytes(budget)} is below the floor {format_bytes(floor)} ({floor} bytes: "
            f"all experts at {low}); raise --expert-memory or take a lower tier"
        )
    return budget
