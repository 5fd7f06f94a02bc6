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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from dynaexq.core import ExpertKey
from dynaexq.device import Device
from dynaexq.policy.caching import CACHE_POLICIES, CacheMap, Places
from dynaexq.policy.foresight import CacheMind
from dynaexq.policy.horizon import ReadSums
from dynaexq.policy.prediction import Matrix
from dynaexq.residency.arena import READERS, ExpertArena, VersionSource
from dynaexq.residency.budget import BudgetTracker
from dynaexq.residency.handles import Words
from dynaexq.residency.loading import Load, LoadCounters, Readers, SlowLink
from dynaexq.residency.mixture import Mixture, SecondTier
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
        second: SecondTier | None = None,
    ) -> None:
        """Reserve and allocate; nothing is resident yet.

        `link_bytes_per_second` slows reads down to those of a slower link; of those ahead, `in_flight` go on at once;
        `second` are low versions, which some needs go to.

        Raises:
            MemoryLimitError: the blocks do not fit the budget.
        """
        tiers = [tier, second.tier] if second else [tier]
        super().__init__(source.shape, [source.format(each) for each in tiers])
        self.turn = threading.Lock()
        self.counters, self.loads = Counters(), LoadCounters()
        self._make_mind, self._source = make_mind, source
        self._link, self._in_flight = SlowLink(link_bytes_per_second), in_flight
        cache, self.foresight = make_mind()
        size = len(cache.resident)
        self._mixture = Mixture(second, size, source.shape.experts) if second else None
        maps = [cache, _make_low_map(second, size)] if second else [cache]
        start = 0
        for layout, each in zip(self.layouts, maps, strict=True):
            self.pools.append(BlockPool(start, layout.extent_bytes, each.capacity))
            start += each.capacity * layout.extent_bytes
        self.allocate(start, device, budget)
        self.shelves = [Shelf(at, tiers[at], self.pools[at], each) for at, each in enumerate(maps)]
        self._changed = threading.Condition()  # guards all that follows, and shelves, handles and counters
        self._demanded: deque[Load] = deque()
        self._failures: dict[tuple[int, int], Exception] = {}
        self._wanted: list[Places] = []
        self._ahead = 0
        self._making_room = False
        self._returned, self._computed, self._waited = time.monotonic(), 0.0, 0.0
        for place in range(size):
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

    def levels(self) -> Places:
        """Index of the tier at which every expert ran last, [experts of all layers]."""
        return self._mixture.levels.copy() if self._mixture else np.zeros(len(self.map.resident), np.int64)

    def blank_words(self) -> Words:
        """Words [experts of all layers] through which nothing can be reached, for a forward pass that begins."""
        return np.full(len(self.map.resident), ABSENT, np.uint64)

    def look(self, layer: int, ids: Places, hidden: Matrix | None) -> list[Places]:
        """A layer's router chose ids [tokens, top_k], given hidden [tokens, hidden]: its distinct experts, in groups
        that fit; those that are resident come first. What is read ahead goes by it from now on."""
        first = layer * self.shape.experts
        with self._changed:
            needed = np.unique(ids) if self.foresight is None else self.foresight.look(layer, ids, hidden)
            if self._mixture:
                self._mixture.look(ids)
            groups = self.map.split(first + needed)
        return [group - first for group in groups]

    def request(self, layer: int, experts: Places, words: Words) -> None:
        """Begin to make distinct experts of a layer resident: those that are can be reached through its `words`
        [experts] at once, the others after `arrive`."""
        words[:] = ABSENT
        start, places = time.monotonic(), layer * self.shape.experts + experts
        with self._changed:
            self._note_computed(layer, start - self._returned)
            self._failures.clear()
            self._making_room = True
            try:
                while not self._fits(places):
                    self._changed.wait()
            finally:
                self._making_room = False
            self._wanted = self._split(places)
            for shelf, some in zip(self.shelves, self._wanted, strict=True):
                missing, victims = shelf.map.need(some)
                self._give_up(shelf, victims)
                self._demanded.extend(shelf.begin(missing, ahead=False))
            if self.foresight:
                self.foresight.wish(layer, self.map)
                for some in self._wanted[1:]:
                    self.foresight.prefer(some)
            if len(self._demanded) > 1 or self.overlaps or len(self._wanted[-1]) < len(places):
                self._changed.notify_all()
            self._point(layer, words)
            self._returned = time.monotonic()
            self._waited += self._returned - start

    def arrive(self, layer: int, experts: Places, words: Words) -> None:
        """Wait for what `request` was asked for: all of them can be reached, and no others.

        Raises:
            StoreError, CheckpointError: an expert cannot be read; the cache stays whole.
        """
        start = time.monotonic()
        while True:
            with self._changed:
                load = self._demanded.popleft() if self._demanded else None
                if load is None:
                    while self._arriving():
                        self._changed.wait()
                    self._computed += start - self._returned
                    self._returned = time.monotonic()
                    self._waited += self._returned - start
                    self.counters.waits += 1
                    self.counters.wait_seconds += self._returned - start
                    for number, some in enumerate(self._wanted):
                        if failed := [key for place in some.tolist() if (key := (number, place)) in self._failures]:
                            raise self._failures[failed[0]]
                    self._point(layer, words)
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
            for shelf in self.shelves:
                shelf.map.unpin()

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
                while any(shelf.map.loading.any() for shelf in self.shelves):
                    self._changed.wait()
                cache, self.foresight = self._make_mind()
                for shelf in self.shelves:
                    gone = shelf.places
                    low = _make_low_map(self._mixture.second, len(cache.resident)) if self._mixture else cache
                    shelf.clear(low if shelf.number else cache)
                    self._publish(gone)
                cache.hits, cache.misses, cache.late, cache.useful, cache.wasted = counts
                self.counters, self.loads = kept

    def describe(self) -> dict[str, float]:
        """See CacheMap.describe and Foresight.describe; reads that wait, that go on (at most `in_flight` of those
        ahead), and that ended, and which share of their time was hidden."""
        with self._changed:
            demanded, wishes = len(self._demanded), self.foresight.waiting if self.foresight else 0
            return {
                **self.map.describe(),
                **(self._mixture.describe(self.shelves[1].map, self.map) if self._mixture else {}),
                "queued": demanded + wishes,
                "reading": sum(int(np.count_nonzero(shelf.map.loading)) for shelf in self.shelves) - demanded,
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
            formats, left = self.handles.formats(), ~self.map.resident
            assert np.array_equal(formats == 0, self.map.resident)
            for shelf in self.shelves[1:]:
                assert np.array_equal(formats == shelf.number, shelf.map.resident & left)

    def _fits(self, places: Places) -> bool:
        """Whether there is room for whatever a layer's needs come to."""
        return self.map.fits(places) and not any(shelf.map.loading.any() for shelf in self.shelves[1:])

    def _split(self, places: Places) -> list[Places]:
        """A layer's needs, by shelf."""
        if self._mixture is None:
            return [places]
        low = self._mixture.split(places, *self.shelves)
        return [places[~low], places[low]]

    def _arriving(self) -> bool:
        """Whether something that the layer needs is on its way."""
        return any(shelf.map.loading[some].any() for shelf, some in zip(self.shelves, self._wanted, strict=True))

    def _point(self, layer: int, words: Words) -> None:
        """Words of a layer's needs, as far as they are there."""
        for shelf, some in zip(self.shelves, self._wanted, strict=True):
            words[some - layer * self.shape.experts] = shelf.words[some]

    def _publish(self, places: Iterable[int]) -> None:
        """Have observers see what experts are reached by: the best version that is there."""
        for place in places:
            words = [int(shelf.words[place]) for shelf in self.shelves]
            self.handles.publish(place, next((word for word in words if word != int(ABSENT)), int(ABSENT)))

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
        shelf.give_up(victims)
        self._publish(victims.tolist())
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
                    self._publish([load.place])
                    self.counters.bytes_moved += nbytes
                    self.loads.loads += 1
                    self.loads.ahead += load.ahead
                    seconds = time.monotonic() - max(start, carried[0])
                    self.loads.seconds += seconds
                    if self._mixture:
                        self._mixture.note_read(load.shelf, seconds)
                else:
                    self.counters.failed += 1
                    if error is not None:
                        self._failures[load.shelf, load.place] = error
                self._changed.notify_all()

    def _note_computed(self, layer: int, seconds: float) -> None:
        """Tell the horizon what the layer before took, of which `seconds` have just passed, and how long it waited."""
        if self._mixture and layer > 0:
            self._mixture.note_layer(self._computed + seconds)
        if self.foresight:
            sums = ReadSums(self.loads.loads, self.loads.seconds, self.map.wasted)
            self.foresight.horizon.follow(layer, self._computed + seconds, self._waited, sums)
        self._computed = self._waited = 0.0


def _make_low_map(second: SecondTier, size: int) -> CacheMap:
    """Who has a low version resident: those that were needed last."""
    return CacheMap(size, second.capacity, CACHE_POLICIES["lru"](size, 1))
