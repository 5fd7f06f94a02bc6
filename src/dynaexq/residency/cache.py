"""Experts of which only some are resident: others are read when a layer needs them, or before it does.

The mode for models whose lowest tier does not fit (ExpertFlow, section 3). A forward pass has the cache to itself; its
words start out pointing nowhere, and an expert is reachable only after `bring` made it resident for the very layer that
runs, so that no kernel can read a block that has changed hands. Nobody whom that layer needs can be given up, and what
is read ahead takes blocks only of those who are worth less.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from dynaexq.core import ExpertKey
from dynaexq.device import Device
from dynaexq.policy.caching import CacheMap, Places
from dynaexq.policy.foresight import CacheMind
from dynaexq.policy.horizon import ReadSums
from dynaexq.policy.prediction import Matrix
from dynaexq.residency.arena import READERS, ExpertArena, VersionSource
from dynaexq.residency.budget import BudgetTracker
from dynaexq.residency.handles import Words
from dynaexq.residency.loading import Load, LoadCounters, Readers, SlowLink
from dynaexq.residency.pool import BlockPool
from dynaexq.residency.shelf import ABSENT, Shelf
from dynaexq.residency.transitions import Counters


class CachedExperts(ExpertArena):
    """Experts at one tier in blocks of their size. Called by whoever holds `turn`, but for counters and `handles`."""

    def __init__(
        self,
        source: VersionSource,
        tier: str,
        make_mind: Callable[[], CacheMind],
        device: Device,
        budget: BudgetTracker,
        link_bytes_per_second: float | None = None,
        in_flight: int = 2,
    ) -> None:
        """Reserve and allocate; nothing is resident yet.

        `link_bytes_per_second` slows reads down to those of a slower link; of those ahead, `in_flight` go on at once.

        Raises:
            MemoryLimitError: the blocks do not fit the budget.
        """
        super().__init__(source.shape, [source.format(tier)])
        self.turn = threading.Lock()
        self.counters, self.loads = Counters(), LoadCounters()
        self._make_mind, self._source = make_mind, source
        self._link, self._in_flight = SlowLink(link_bytes_per_second), in_flight
        cache, self.foresight = make_mind()
        nbytes = self.layouts[0].extent_bytes
        self.pools = [BlockPool(0, nbytes, cache.capacity)]
        self.allocate(cache.capacity * nbytes, device, budget)
        self.shelves = [Shelf(0, tier, self.pools[0], cache)]
        self._changed = threading.Condition()  # guards all that follows, and shelves, handles and counters
        self._demanded: deque[Load] = deque()
        self._failures: dict[int, Exception] = {}
        self._ahead = 0
        self._making_room = False
        self._returned, self._computed, self._waited = time.monotonic(), 0.0, 0.0
        for place in range(len(cache.resident)):
            self.handles.publish(place, int(ABSENT))
        self._readers = Readers(READERS, self._changed, self._find_load, self._run, source.close)

    @property
    def map(self) -> CacheMap:
        """Who is resident."""
        return self.shelves[0].map

    @property
    def overlaps(self) -> bool:
        """Whether layers compute who is there while others are read: where reading ahead pays, this does."""
        return self.foresight is not None and self.foresight.horizon.layers > 0

    def blank_words(self) -> Words:
        """Words [experts of all layers] through which nothing can be reached, for a forward pass that begins."""
        return np.full(len(self.map.resident), ABSENT, np.uint64)

    def look(self, layer: int, ids: Places, hidden: Matrix | None) -> list[Places]:
        """A layer's router chose ids [tokens, top_k], given hidden [tokens, hidden]: its distinct experts, in groups
        that fit; those that are resident come first. What is read ahead goes by it from now on."""
        first = layer * self.shape.experts
        with self._changed:
            needed = np.unique(ids) if self.foresight is None else self.foresight.look(layer, ids, hidden)
            groups = self.map.split(first + needed)
        return [group - first for group in groups]

    def request(self, layer: int, experts: Places, words: Words) -> None:
        """Begin to make distinct experts of a layer resident: those that are can be reached through its `words`
        [experts] at once, the others after `arrive`."""
        words[:] = ABSENT
        start, places, shelf = time.monotonic(), layer * self.shape.experts + experts, self.shelves[0]
        with self._changed:
            self._note_computed(layer, start - self._returned)
            self._failures.clear()
            self._making_room = True
            try:
                while not shelf.map.fits(places):
                    self._changed.wait()
            finally:
                self._making_room = False
            missing, victims = shelf.map.need(places)
            self._give_up(shelf, victims)
            self._demanded.extend(shelf.begin(missing, ahead=False))
            if self.foresight:
                self.foresight.wish(layer, shelf.map)
            if len(missing) > 1 or self.overlaps:
                self._changed.notify_all()
            words[experts] = shelf.words[places]
            self._returned = time.monotonic()
            self._waited += self._returned - start

    def arrive(self, layer: int, experts: Places, words: Words) -> None:
        """Wait for what `request` was asked for: all of them can be reached, and no others.

        Raises:
            StoreError, CheckpointError: an expert cannot be read; the cache stays whole.
        """
        start, places, shelf = time.monotonic(), layer * self.shape.experts + experts, self.shelves[0]
        while True:
            with self._changed:
                load = self._demanded.popleft() if self._demanded else None
                if load is None:
                    while shelf.map.loading[places].any():
                        self._changed.wait()
                    self._computed += start - self._returned
                    self._returned = time.monotonic()
                    self._waited += self._returned - start
                    self.counters.waits += 1
                    self.counters.wait_seconds += self._returned - start
                    if failed := [self._failures[place] for place in places.tolist() if place in self._failures]:
                        raise failed[0]
                    words[experts] = shelf.words[places]
                    return
            self._run(load)  # oneself: waking a thread takes longer than some reads

    def bring(self, layer: int, experts: Places, words: Words) -> None:
        """Both, one after the other."""
        self.request(layer, experts, words)
        if (words[experts] == ABSENT).any():
            self.arrive(layer, experts, words)

    def rest(self) -> None:
        """No layer runs any more."""
        with self._changed:
            self.map.unpin()

    @contextmanager
    def forgotten(self) -> Iterator[None]:
        """After what happens within, the cache is empty, and its counters are as before."""
        kept = replace(self.counters), replace(self.loads)
        before = self.map
        counts = before.hits, before.misses, before.late, before.useful, before.wasted
        try:
            yield
        finally:
            with self._changed:
                if self.foresight:
                    self.foresight.drop()
                while self.map.loading.any():
                    self._changed.wait()
                for place in self.shelves[0].places:
                    self.handles.publish(place, int(ABSENT))
                cache, self.foresight = self._make_mind()
                self.shelves[0].clear(cache)
                cache.hits, cache.misses, cache.late, cache.useful, cache.wasted = counts
                self.counters, self.loads = kept

    def describe(self) -> dict[str, float]:
        """See CacheMap.describe and Foresight.describe; reads that wait, that go on (at most `in_flight` of those
        ahead), and that ended, and which share of their time was hidden."""
        with self._changed:
            demanded, wishes = len(self._demanded), self.foresight.waiting if self.foresight else 0
            return {
                **self.map.describe(),
                "queued": demanded + wishes,
                "reading": int(np.count_nonzero(self.map.loading)) - demanded,
                "in_flight": self._in_flight,
                **self.loads.describe(self.counters.wait_seconds),
                **(self.foresight.describe() if self.foresight else {}),
            }

    def stop(self) -> None:
        """Read no more, without waiting for anything."""
        self._readers.stop()

    def close(self) -> None:
        """End the readers; the arena stays."""
        self._readers.close()

    def check_integrity(self) -> None:
        """Assert that resident experts have blocks of their own, and that observers see them."""
        with self._changed:
            for shelf in self.shelves:
                shelf.check_integrity()
            assert np.array_equal(self.handles.formats() == 0, self.map.resident)

    def _find_load(self) -> Load | None:
        """What to read next, asked by readers."""
        if self._demanded:
            return self._demanded.popleft()
        if self.foresight is None or self._making_room or self._ahead >= self._in_flight:
            return None
        shelf = self.shelves[0]
        if (found := self.foresight.take(shelf.map)) is None:
            return None
        place, victims = found
        self._give_up(shelf, victims)
        self._ahead += 1
        return shelf.begin(np.array([place]), ahead=True)[0]

    def _give_up(self, shelf: Shelf, victims: Places) -> None:
        for place in victims.tolist():
            self.handles.publish(place, int(ABSENT))
        shelf.give_up(victims)
        self.counters.evictions += len(victims)

    def _run(self, load: Load) -> None:
        """Read an expert; whatever happens, its block is one of a resident expert or free in the end."""
        shelf = self.shelves[load.shelf]
        nbytes = shelf.pool.block_bytes
        error: Exception | None = None
        complete, start, carried = False, time.monotonic(), self._link.reserve(nbytes)
        try:
            key = ExpertKey(*divmod(load.place, self.shape.experts))
            self._source.read_into(key, shelf.tier, self.arena.host_view(load.offset, nbytes))
            complete = True
        except Exception as raised:  # any of them is the read's own, for whoever waits for it
            error = raised
        finally:  # Ctrl-C too
            if complete:
                time.sleep(max(0.0, carried[1] - time.monotonic()))
            with self._changed:
                shelf.end(load, complete)
                self._ahead -= load.ahead
                if complete:
                    self.handles.publish(load.place, int(shelf.words[load.place]))
                    self.counters.bytes_moved += nbytes
                    self.loads.loads += 1
                    self.loads.ahead += load.ahead
                    self.loads.seconds += time.monotonic() - max(start, carried[0])
                else:
                    self.counters.failed += 1
                    if error is not None:
                        self._failures[load.place] = error
                self._changed.notify_all()

    def _note_computed(self, layer: int, seconds: float) -> None:
        """Tell the horizon what the layer before took, of which `seconds` have just passed, and how long it waited."""
        if self.foresight:
            sums = ReadSums(self.loads.loads, self.loads.seconds, self.map.wasted)
            self.foresight.horizon.follow(layer, self._computed + seconds, self._waited, sums)
        self._computed = self._waited = 0.0
