"""Blocks for experts of one tier: who is in them, and through which words they are reached."""

from __future__ import annotations

import numpy as np

from dynaexq.core import encode_handle
from dynaexq.policy.caching import CacheMap, Places
from dynaexq.residency.handles import Words
from dynaexq.residency.loading import Load
from dynaexq.residency.pool import BlockPool

ABSENT = np.uint64(0xFF << 56)
"""A handle word of no format: kernels refuse it."""


class Shelf:
    """Experts at one tier in the blocks of a pool, as `map` says. Called under one lock."""

    def __init__(self, number: int, tier: str, pool: BlockPool, cache: CacheMap) -> None:
        """`number` is that of the tier in the format table, and of the shelf."""
        self.number, self.tier, self.pool, self.map = number, tier, pool, cache
        self.words: Words = np.full(len(cache.resident), ABSENT, np.uint64)
        self._blocks: dict[int, int] = {}

    @property
    def places(self) -> list[int]:
        """Who is resident."""
        return list(self._blocks)

    def begin(self, places: Places, ahead: bool) -> list[Load]:
        """Take blocks for experts that `map` made room for."""
        loads = []
        for place in places.tolist():
            offset = self.pool.take()
            assert offset is not None, "the map makes room before it lets anybody in"
            loads.append(Load(self.number, place, offset, ahead))
        return loads

    def end(self, load: Load, complete: bool) -> None:
        """A load has ended: the expert is reachable, or its block free again."""
        places = np.array([load.place])
        if complete:
            self._blocks[load.place] = load.offset
            self.words[load.place] = encode_handle(self.number, load.offset)
            self.map.admit(places)
        else:
            self.map.withdraw(places)
            self.pool.give_back(load.offset)

    def give_up(self, places: Places) -> None:
        """Experts that `map` let go leave their blocks."""
        for place in places.tolist():
            self.pool.give_back(self._blocks.pop(place))
        self.words[places] = ABSENT

    def clear(self, cache: CacheMap) -> None:
        """Everybody leaves; nobody may be on the way. `cache` is a new map."""
        assert not self.map.loading.any()
        self.give_up(np.array(self.places, np.int64))
        self.map = cache

    def check_integrity(self) -> None:
        """Assert that residents and those on their way have blocks of their own, and others none."""
        taken = set(self._blocks.values())
        coming = int(np.count_nonzero(self.map.loading))
        assert len(taken) == len(self._blocks) == self.map.capacity - self.pool.free - coming
        assert self.map.check_integrity() == len(taken) + coming
        assert set(np.flatnonzero(self.map.resident).tolist()) == set(self._blocks)
        assert all(self.words[place] == encode_handle(self.number, offset) for place, offset in self._blocks.items())
        assert np.array_equal(self.words != ABSENT, self.map.resident)
        assert all(self.pool.holds(offset) for offset in taken)
        self.pool.check_integrity()
