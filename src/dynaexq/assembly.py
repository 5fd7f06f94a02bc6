"""Experts, pipeline, policy and control loop put together, on real memory and threads or on virtual ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dynaexq.control import NO_EXTRAS, ControlLoop, Extras, Wake
from dynaexq.device import Device
from dynaexq.device.copies import CopyEngine
from dynaexq.plan.versions import VersionPlan, drops_between
from dynaexq.policy import Hotness
from dynaexq.residency import BudgetTracker, VersionSource
from dynaexq.residency.resizing import PoolBorder
from dynaexq.residency.transitions import TransitionPipeline
from dynaexq.residency.versions import Levels, VersionedExperts
from dynaexq.shadow import Shadow
from dynaexq.signals import Signals
from dynaexq.steering import Steering
from dynaexq.tuning import Tuning


@dataclass(frozen=True)
class Platform:
    """Where versions live and move.

    Args:
        make_engine: what copies versions in the background.
        load: puts every expert at its level of [layers, experts] at the start; returns bytes per second of the link.
        wake: ends waits of the control loop.
        clock: seconds; updates, copies and waits are timed by it.
        computes: whether windows really run, so that a shadow can look at what versions make of tokens.
    """

    device: Device
    make_engine: Callable[[], CopyEngine]
    load: Callable[[VersionedExperts, Levels], float]
    wake: Wake
    clock: Callable[[], float] = time.monotonic
    computes: bool = True


def assemble(
    source: VersionSource,
    plan: VersionPlan,
    tuning: Tuning,
    drive: str,
    hotness: Hotness,
    platform: Platform,
    budget: BudgetTracker,
    report: Callable[[str], None],
    extras: Extras = NO_EXTRAS,
) -> ControlLoop:
    """The control loop of a run, not started yet, with all experts in place.

    Args:
        hotness: known at the start; the loop goes on from it.
        report: hears of copies that fail.

    Raises:
        StoreError, CheckpointError: versions cannot be read.
        MemoryLimitError: they do not fit the budget.
    """
    shape, losses = source.shape, source.sensitivity
    for tier in plan.tiers:
        source.require_tier(tier)
    experts = VersionedExperts(source, plan.tiers, plan.pools, platform.device, budget)
    border = PoolBorder(experts)
    drops = drops_between(losses, plan.tiers) if losses and plan.over_model else None
    options = tuning.control(drive, drops is not None)
    supers = losses.super_experts if losses and drops is not None else ()
    steering = Steering(shape, border, options.selection, drops, plan.over_model, supers)
    link = platform.load(experts, steering.start(hotness.scores))
    pipeline = TransitionPipeline(experts, source, border, platform.make_engine(), tuning.rate(drive, link), report)
    shadow = None
    room = plan.pools.scratch > 0 or plan.pools.keep_low
    if losses and drops is not None and tuning.shadow != "off" and room and platform.computes and not extras.recorded:
        shadow = Shadow(experts, source, drops, losses.layers)
    signals = Signals(shape, options.keep_at_shift, shadow, tuning.pace(drive, link))
    return ControlLoop(experts, pipeline, steering, options, hotness, signals, platform.wake, platform.clock, extras)
