"""Experts of which only some are resident: the others are read when a layer needs them, into blocks that others leave.

The mode for models whose lowest tier does not fit (ExpertFlow, section 3), with reads on demand. A forward pass has the
cache to itself; its words start out pointing nowhere, and an expert is reachable only after `bring` made it resident
for the very layer that runs, so that no kernel can read a block that has changed hands.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from dynaexq.core import ExpertKey, encode_handle
from dynaexq.device import Device
from dynaexq.policy.caching import CACHE_POLICIES, CacheMap, Places
from dynaexq.residency.arena import READERS, ExpertArena, VersionSource
from dynaexq.residency.budget import BudgetTracker
from dynaexq.residency.handles import Words
from dynaexq.residency.pool import BlockPool
from dynaexq.residency.transitions import Counters

ABSENT = np.uint64(0xFF << 56)
"""A handle word of no format: kernels refuse it."""

HIGHEST = 0


class CachedExperts(ExpertArena):
    """Experts at one tier in `capacity` blocks. Called by whoever holds `turn`, but for counters and `handles`."""

    def __init__(
        self,
        source: VersionSource,
        tier: str,
        capacity: int,
        policy: str,
        device: Device,
        budget: BudgetTracker,
        link_bytes_per_second: float | None = None,
    ) -> None:
        """Reserve and allocate; nothing is resident yet. `policy` is one of CACHE_POLICIES.

        `link_bytes_per_second` slows reads down to those of a slower link.

        Raises:
            MemoryLimitError: the blocks do not fit the budget.
        """
        super().__init__(source.shape, [source.format(tier)])
        assert capacity > 0
        size, layers = self.shape.layers * self.shape.experts, self.shape.layers
        self._make_map: Callable[[], CacheMap] = lambda: CacheMap(size, capacity, CACHE_POLICIES[policy](size, layers))
        self.tier, self.map = tier, self._make_map()
        self.turn = threading.Lock()
        self.counters = Counters()
        self._source, self._link = source, link_bytes_per_second
        self._block_bytes = self.layouts[HIGHEST].extent_bytes
        self.pools = [BlockPool(0, self._block_bytes, capacity)]
        self.allocate(capacity * self._block_bytes, device, budget)
        self._blocks: dict[int, int] = {}
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="dynaexq-read")
        for place in range(size):
            self.handles.publish(place, int(ABSENT))

    def blank_words(self) -> Words:
        """Words [experts of all layers] through which nothing can be reached, for a forward pass that begins."""
        return np.full(len(self.map.resident), ABSENT, np.uint64)

    def split(self, layer: int, ids: Places) -> list[Places]:
        """The distinct experts among `ids` of a layer, in groups that fit; those that are resident come first."""
        first = layer * self.shape.experts
        return [group - first for group in self.map.split(first + np.unique(ids))]

    def bring(self, layer: int, experts: Places, words: Words) -> None:
        """Make distinct experts of a layer resident, and reachable through its `words` [experts], no others.

        Raises:
            StoreError, CheckpointError: an expert cannot be read; the cache stays whole.
        """
        words[:] = ABSENT
        self._make_resident(layer * self.shape.experts + experts)
        for expert in experts.tolist():
            words[expert] = encode_handle(HIGHEST, self._blocks[layer * self.shape.experts + expert])

    @contextmanager
    def forgotten(self) -> Iterator[None]:
        """After what happens within, the cache is empty, and its counters are as before."""
        before = self.map.hits, self.map.misses, replace(self.counters)
        try:
            yield
        finally:
            for place in list(self._blocks):
                self._give_up(place)
            self.map = self._make_map()
            self.map.hits, self.map.misses, self.counters = before

    def close(self) -> None:
        """End the readers; the arena stays."""
        self._readers.shutdown()
        self._source.close()

    def check_integrity(self) -> None:
        """Assert that resident experts have blocks of their own, and that observers see them."""
        taken = set(self._blocks.values())
        assert len(taken) == len(self._blocks) == self.map.capacity - self.pools[HIGHEST].free
        assert set(np.flatnonzero(self.map.resident).tolist()) == set(self._blocks)
        assert all(self.pools[HIGHEST].holds(offset) for offset in taken)
        assert np.array_equal(self.handles.formats() == HIGHEST, self.map.resident)
        self.pools[HIGHEST].check_integrity()

    def _make_resident(self, places: Places) -> None:
        start = time.monotonic()
        missing, victims = self.map.need(places)
        for place in victims.tolist():
            self._give_up(place)
        self.counters.evictions += len(victims)
        if len(missing):
            self._read(missing.tolist(), start)
            self.counters.waits += 1
            self.counters.wait_seconds += time.monotonic() - start

    def _give_up(self, place: int) -> None:
        self.handles.publish(place, int(ABSENT))
        self.pools[HIGHEST].give_back(self._blocks.pop(place))

    def _read(self, places: list[int], start: float) -> None:
        """Read experts into free blocks, several at a time. The first failure is raised when all have ended."""
        offsets = [offset for _ in places if (offset := self.pools[HIGHEST].take()) is not None]
        assert len(offsets) == len(places), "the map makes room before it lets anybody in"
        try:
            failures = self._read_all(places, offsets)
        except BaseException:  # Ctrl-C: nobody has come
            for offset in offsets:
                self.pools[HIGHEST].give_back(offset)
            raise
        for place, offset, failure in zip(places, offsets, failures, strict=True):
            if failure is not None:
                self.pools[HIGHEST].give_back(offset)
                self.counters.failed += 1
                continue
            self._blocks[place] = offset
            self.handles.publish(place, encode_handle(HIGHEST, offset))
            self.counters.bytes_moved += self._block_bytes
        self.map.admit(np.array([place for place in places if place in self._blocks], np.int64))
        if failed := next((failure for failure in failures if failure is not None), None):
            raise failed
        if self._link is not None:
            time.sleep(max(0.0, start + len(places) * self._block_bytes / self._link - time.monotonic()))

    def _read_all(self, places: list[int], offsets: list[int]) -> list[Exception | None]:
        """What went wrong with each. Whatever is raised, no read goes on."""
        if len(places) == 1:  # without another thread, which would take longer to wake than some reads take
            return [self._read_one(places[0], offsets[0])]
        reads = [self._readers.submit(self._read_one, *each) for each in zip(places, offsets, strict=True)]
        try:
            return [read.result() for read in reads]
        finally:
            wait(reads)

    def _read_one(self, place: int, offset: int) -> Exception | None:
        key = ExpertKey(*divmod(place, self.shape.experts))
        try:
            self._source.read_into(key, self.tier, self.arena.host_view(offset, self._block_bytes))
        except Exception as error:  # any of them is the read's own, and raised once the others have ended
            return error
        return None
