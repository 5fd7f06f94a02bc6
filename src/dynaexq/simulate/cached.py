"""Caches in virtual time, from what is asked for: experts on demand, or also ahead by a predictor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from dynaexq.device.virtual import VirtualClock, VirtualLink
from dynaexq.plan.memory import cache_capacity
from dynaexq.policy.caching import FLOW, CacheMap
from dynaexq.policy.foresight import make_flow_mind
from dynaexq.policy.prediction import Predictor, Routers
from dynaexq.predictor.choice import AVERAGE, pick_predictor
from dynaexq.residency import VersionSource
from dynaexq.simulate.cache import SimulatedCache, VirtualCache, make_policy
from dynaexq.simulate.feed import Block
from dynaexq.simulate.flow import SimulatedFlow
from dynaexq.simulate.options import SimulationOptions
from dynaexq.simulate.oracle import Oracle, list_passes
from dynaexq.simulate.trace_source import version_bytes
from dynaexq.tuning import make_tuning

Ahead = Callable[[], Iterable[Block]]
"""Gives the passes to come, to who must know them."""


def make_cache(
    source: VersionSource, options: SimulationOptions, clock: VirtualClock, ahead: Ahead, routers: Routers | None
) -> VirtualCache:
    """The cache of a mode of `options.CACHED`; `routers` are for predictors that ask them.

    Raises:
        OptionError, MemoryLimitError, SideFileError: it cannot be had.
    """
    assert options.tier is not None and options.expert_memory is not None
    shape, nbytes = source.shape, version_bytes(source, options.tier)
    capacity = cache_capacity(shape, options.tier, nbytes, options.expert_memory)
    if options.mode != FLOW:
        cache = CacheMap(shape.layers * shape.experts, capacity, make_policy(options.mode, shape, ahead))
        return SimulatedCache(shape, cache, nbytes, options.link, options.latency)
    tuning = make_tuning(options.tune, FLOW)
    link = VirtualLink(clock, options.speed(tuning), options.latency)
    mind = make_flow_mind(_choose_predictor(source, options, ahead, routers), shape, capacity, tuning.foresight)
    return SimulatedFlow(shape, mind, nbytes, clock, link, tuning.in_flight)


def _choose_predictor(
    source: VersionSource, options: SimulationOptions, ahead: Ahead, routers: Routers | None
) -> Callable[[], Predictor]:
    if options.accuracy is None:
        return pick_predictor(options.predictor or AVERAGE, routers, source.shape, source.fingerprint)
    return partial(Oracle, source.shape, options.accuracy, list_passes(source.shape, ahead()))
