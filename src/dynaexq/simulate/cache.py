"""A cache of experts in virtual time: the engine's own decisions (policy/caching.py), reads as long as a link takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from dynaexq.core import ModelShape, OptionError
from dynaexq.policy.caching import CACHE_POLICIES, CacheMap, CachePolicy, Places
from dynaexq.policy.hotness import Scores
from dynaexq.residency.transitions import Counters
from dynaexq.simulate.feed import Asked, Block

BELADY = "belady"
CACHES = (*CACHE_POLICIES, BELADY)
"""Those that read on need alone."""

MAX_NEEDS = 30_000_000
"""Needs of layers for experts that are known ahead at most (`belady`): about 1 GiB."""


class VirtualCache(Protocol):
    """Experts of which only some are resident, in virtual time."""

    map: CacheMap
    counters: Counters

    @property
    def expert_bytes(self) -> int:
        """Of all blocks."""

    @property
    def busy_seconds(self) -> float:
        """Of reads."""

    def run(self, asked: Asked, start: float, seconds: float) -> float:
        """One pass, which takes so many seconds beside what it waits; returns when it ends."""

    def describe(self) -> dict[str, float]:
        """Who was resident when they were needed, and what became of reads."""


class Belady:
    """Whoever is needed last gives way: no cache that reads on demand misses less. For that it knows the future."""

    def __init__(self, size: int, needs: Iterable[tuple[Places, int]]) -> None:
        """`needs` are all needs in their order: distinct experts, and when, rising.

        Raises:
            OptionError: more than MAX_NEEDS.
        """
        places, times = [], []
        total = 0
        for some, when in needs:
            total += len(some)
            if total > MAX_NEEDS:
                raise OptionError(
                    f"more than {MAX_NEEDS} needs are too many to know ahead; cut the trace with `dynaexq trace slice`"
                )
            places.append(some.astype(np.int32))
            times.append(np.full(len(some), when, np.int32))
        whole = np.concatenate(places) if places else np.zeros(0, np.int32)
        order = np.argsort(whole, kind="stable")
        self._times = np.append(np.concatenate(times)[order] if times else np.zeros(0, np.int32), -1).astype(np.int64)
        starts = np.searchsorted(whole[order], np.arange(size + 1))
        self._next, self._ends = starts[:-1].copy(), starts[1:]
        self.worth: Scores = np.full(size, -np.inf)

    def note(self, places: Places) -> None:
        """See policy.caching.CachePolicy."""
        self._next[places] += 1
        following = self._next[places]
        times = self._times[np.minimum(following, len(self._times) - 1)].astype(np.float64)
        self.worth[places] = np.where(following < self._ends[places], -times, -np.inf)


class SimulatedCache:
    """Experts of `nbytes` each, of which `capacity` are resident."""

    def __init__(self, shape: ModelShape, cache: CacheMap, nbytes: int, link: float, latency: float) -> None:
        """Reads take `latency` seconds for each layer that waits, and their bytes over `link` bytes per second."""
        self.map, self.counters = cache, Counters()
        self._shape, self._nbytes, self._link, self._latency = shape, nbytes, link, latency

    @property
    def expert_bytes(self) -> int:
        """See VirtualCache."""
        return self.map.capacity * self._nbytes

    @property
    def busy_seconds(self) -> float:
        """See VirtualCache."""
        return self.counters.wait_seconds

    def describe(self) -> dict[str, float]:
        """See VirtualCache."""
        return self.map.describe()

    def run(self, asked: Asked, start: float, seconds: float) -> float:
        """See VirtualCache."""
        waited, experts, counts = 0.0, self._shape.experts, asked.counts
        for layer in range(self._shape.layers):
            needed = layer * experts + np.flatnonzero(counts[layer * experts : (layer + 1) * experts])
            for group in self.map.split(needed):
                missing, victims = self.map.need(group)
                self.map.admit(missing)
                self.counters.evictions += len(victims)
                if len(missing):
                    waited += self._latency + len(missing) * self._nbytes / self._link
                    self.counters.waits += 1
                    self.counters.bytes_moved += len(missing) * self._nbytes
        self.counters.wait_seconds += waited
        return start + seconds + waited


def make_policy(name: str, shape: ModelShape, ahead: Callable[[], Iterable[Block]]) -> CachePolicy:
    """One of CACHES; `ahead` gives the passes to come, to who must know them."""
    size = shape.layers * shape.experts
    if name == BELADY:
        return Belady(size, list_needs(shape, ahead()))
    return CACHE_POLICIES[name](size, shape.layers)


def list_needs(shape: ModelShape, blocks: Iterable[Block]) -> Iterable[tuple[Places, int]]:
    """All needs of passes, layer by layer."""
    when, size = 0, shape.layers * shape.experts
    for block in blocks:
        for place in range(len(block.ends)):
            needed = np.flatnonzero(block.selections(block.rows(place), size))
            for part in np.split(needed, np.searchsorted(needed, shape.experts * np.arange(1, shape.layers))):
                yield part, when
                when += 1
