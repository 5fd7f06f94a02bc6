"""Versioned Expert Residency: which version of each expert is in force, and the blocks behind it.

One thread, the control thread, calls everything that changes state; any thread may open windows on `handles`.
(dynaexq paper, section 1: VER; section 2: pools.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynaexq.core import LEGAL_MOVES, ExpertKey, Residency, decode_handle, encode_handle
from dynaexq.device import Device
from dynaexq.device.base import Bytes
from dynaexq.residency.arena import ExpertArena, Fill, VersionSource, fill_blocks
from dynaexq.residency.budget import BudgetTracker
from dynaexq.residency.layout import PoolPlan
from dynaexq.residency.pool import BlockPool

Levels = np.ndarray[tuple[int, int], np.dtype[np.int8]]
"""Place of every expert's tier in the format table, [layers, experts]: 0 is the highest tier."""

HIGHEST = 0


class Retired(NamedTuple):
    """A block of the pool of `level` whose handle was switched away at `epoch`."""

    key: ExpertKey
    level: int
    offset: int
    epoch: int


class Filling(NamedTuple):
    """A block on its way to be the version of `level`."""

    level: int
    offset: int


@dataclass
class Entry:
    """Metadata of one expert: its state, the level in force, its block by level (None: not resident), the block being
    filled, and the epoch of its last publish."""

    state: Residency
    level: int
    blocks: list[int | None]
    filling: Filling | None = None
    epoch: int = -1


class VersionedExperts(ExpertArena):
    """All experts at one of several tiers, within a pool of fixed blocks for each.

    The plan says how many blocks each pool has, and whether the low version stays resident under a high one (a
    demotion then copies nothing; two tiers only) or gives its block up (fewer bytes). It stays where the high tier is
    nested in the low one: a block of the high pool then holds what the low version lacks.
    """

    def __init__(
        self, source: VersionSource, tiers: Sequence[str], plan: PoolPlan, device: Device, budget: BudgetTracker
    ) -> None:
        """Reserve and allocate the arena for `tiers`, from the highest down.

        Raises:
            MemoryLimitError: it does not fit the budget.
        """
        super().__init__(source.shape, [source.format(tier) for tier in tiers])
        assert tuple(layout.extent_bytes for layout in self.layouts) == plan.sizes
        self.tiers = tuple(tiers)
        self.lowest = len(tiers) - 1
        self.plan = plan
        self.keep_low = plan.keep_low
        self.nested = self.bases[HIGHEST] is not None
        assert self.keep_low or not self.nested, "a nested version needs the one it refines"
        assert not self.keep_low or len(tiers) == 2
        ends = np.cumsum([0, *(size * count for size, count in zip(plan.sizes, plan.blocks, strict=True))]).tolist()
        self.pools = [BlockPool(*each) for each in zip(ends[:-1], plan.sizes, plan.blocks, strict=True)]
        self.scratch_offset = ends[-1]
        self.allocate(plan.nbytes, device, budget)
        self.entries: dict[ExpertKey, Entry] = {}
        self.retired: deque[Retired] = deque()
        self.epoch = 0
        """Of the last version that came into force."""
        self._levels: Levels = np.full((self.shape.layers, self.shape.experts), self.lowest, np.int8)

    def destination(self, level: int, offset: int) -> Bytes:
        """The block at `offset`, to be filled."""
        return self.arena.host_view(offset, self.pools[level].block_bytes)

    def place(self, key: ExpertKey, level: int) -> int:
        """Give an expert that has no version yet a block of a level, at start-up; `settle` publishes it once filled."""
        offset = self.pools[level].take()
        assert offset is not None, "the pools hold every expert"
        entry = self.entries.setdefault(key, Entry(Residency.RESIDENT_LO, self.lowest, [None] * len(self.pools)))
        entry.blocks[level] = offset
        return offset

    def settle(self, key: ExpertKey) -> None:
        """Put the best version that `place` made resident in force."""
        entry = self.entries[key]
        entry.level = next(level for level, block in enumerate(entry.blocks) if block is not None)
        entry.state = self._at_rest(entry)
        self._publish(key)

    def try_begin(self, key: ExpertKey, level: int) -> int | None:
        """Reserve a block for a transfer to `level` and mark it as begun; None, and no change, where there is none.

        Returns the block's offset, to be filled; `finish` or `abandon` must follow.
        """
        entry = self.entries[key]
        assert level != entry.level
        offset = self.pools[level].take()
        if offset is None:
            return None
        self._move(entry, Residency.PROMOTING if level < entry.level else Residency.DEMOTING)
        entry.filling = Filling(level, offset)
        return offset

    def finish(self, key: ExpertKey) -> None:
        """The transfer is complete and checked: publish it, and retire what it replaces."""
        entry, before = self.entries[key], self.entries[key].level
        assert entry.filling is not None
        entry.level = entry.filling.level
        entry.blocks[entry.level], entry.filling = entry.filling.offset, None
        epoch = self._publish(key)
        if self.keep_low and entry.level == HIGHEST:
            self._move(entry, Residency.RESIDENT_HI)
        else:
            self._retire(key, before, epoch)

    def abandon(self, key: ExpertKey) -> None:
        """The transfer failed: the old version stays in force, the block is free again."""
        entry = self.entries[key]
        assert entry.filling is not None
        self.pools[entry.filling.level].give_back(entry.filling.offset)
        entry.filling = None
        self._move(entry, self._at_rest(entry))

    def drop_high(self, key: ExpertKey) -> None:
        """Demote where the low version is resident: switch the handle, copy nothing."""
        entry = self.entries[key]
        assert self.keep_low and entry.blocks[self.lowest] is not None and entry.level == HIGHEST
        entry.level = self.lowest
        self._retire(key, HIGHEST, self._publish(key))

    def resting_low(self, offsets: set[int]) -> list[ExpertKey]:
        """Experts at rest whose low version is in one of the blocks at `offsets`."""
        return [
            key
            for key, entry in self.entries.items()
            if entry.state is Residency.RESIDENT_LO and entry.blocks[self.lowest] in offsets
        ]

    def relocate(self, key: ExpertKey) -> bool:
        """Copy the low version of an expert at rest to a free low block and retire its old one; False: none is free."""
        entry = self.entries[key]
        old, new = entry.blocks[self.lowest], self.pools[self.lowest].take()
        assert entry.state is Residency.RESIDENT_LO and old is not None
        if new is None:
            return False
        self.destination(self.lowest, new)[:] = self.destination(self.lowest, old)
        entry.blocks[self.lowest] = new
        self._move(entry, Residency.EVICTING)
        self.retired.append(Retired(key, self.lowest, old, self._publish(key)))
        return True

    def reclaim(self) -> int:
        """Free retired blocks that no live window can reach; returns how many."""
        freed = 0
        for _ in range(len(self.retired)):
            item = self.retired.popleft()
            if not self.handles.drained(item.epoch):
                self.retired.append(item)
                continue
            entry = self.entries[item.key]
            self.pools[item.level].give_back(item.offset)
            self._move(entry, self._at_rest(entry))
            freed += 1
        return freed

    def levels(self) -> Levels:
        """Levels of the versions in force, [layers, experts]."""
        return self._levels.copy()

    def find_detour(self, wanted: Levels) -> tuple[ExpertKey, int] | None:
        """Who should go where for the time being, because the way to `wanted` is blocked; None: nobody can.

        An expert that is to leave a pool where another one is wanted, and a level that has a free block. Pools without
        spare blocks of their own exchange experts like this.
        """
        blocked = self._levels != wanted
        sought = np.isin(self._levels, np.unique(wanted[blocked])) & blocked
        free = [level for level, pool in enumerate(self.pools) if pool.free]
        if not sought.any() or not free:
            return None
        return ExpertKey(*divmod(int(np.flatnonzero(sought)[0]), self.shape.experts)), free[0]

    def check_integrity(self) -> None:
        """Assert the invariants: each handle on a complete block of its own, pools kept, no block lost."""
        window, words = self.handles.pin()
        handles = {key: decode_handle(int(words[self.shape.index(key)])) for key in self.entries}
        self.handles.release(window)
        held: list[list[int]] = [[] for _ in self.pools]
        for key, entry in self.entries.items():
            handle = handles[key]
            seen = handle if handle.residual is None else handle._replace(offset=handle.residual)
            assert handle.format_index == entry.level == self._levels[key]
            assert entry.blocks[entry.level] == seen.offset, f"{key}: the handle is not on a resident version"
            assert handle.residual is None or entry.blocks[self.lowest] == handle.offset, f"{key}: not on its own low"
            assert (handle.residual is not None) is (self.nested and handle.format_index == HIGHEST)
            moving = entry.state in (Residency.PROMOTING, Residency.DEMOTING)
            assert (entry.filling is not None) is moving, f"{key}: {entry.state} with {entry.filling}"
            if entry.state in (Residency.RESIDENT_LO, Residency.RESIDENT_HI):
                assert entry.state is self._at_rest(entry)
            resident = [level for level, block in enumerate(entry.blocks) if block is not None]
            assert resident == ([HIGHEST, self.lowest] if self.keep_low and entry.level == HIGHEST else [entry.level])
            for level in resident:
                held[level].append(entry.blocks[level] or 0)
            if entry.filling is not None:
                assert (entry.filling.level < entry.level) is (entry.state is Residency.PROMOTING)
                held[entry.filling.level].append(entry.filling.offset)
        for item in self.retired:
            held[item.level].append(item.offset)
            assert self.entries[item.key].state is Residency.EVICTING
        assert len(self.retired) == sum(entry.state is Residency.EVICTING for entry in self.entries.values())
        for blocks, offsets in zip(self.pools, held, strict=True):
            blocks.check_integrity()
            assert len(set(offsets)) == len(offsets) == blocks.capacity - blocks.free, "a block is lost or in two hands"

    def _at_rest(self, entry: Entry) -> Residency:
        return Residency.RESIDENT_LO if entry.level == self.lowest else Residency.RESIDENT_HI

    def _publish(self, key: ExpertKey) -> int:
        entry = self.entries[key]
        offset, residual = entry.blocks[entry.level], None
        if self.nested and entry.level == HIGHEST:
            offset, residual = entry.blocks[self.lowest], offset
        assert offset is not None
        self._levels[key] = entry.level
        self.epoch = entry.epoch = self.handles.publish(
            self.shape.index(key), encode_handle(entry.level, offset, residual)
        )
        return entry.epoch

    def _retire(self, key: ExpertKey, level: int, epoch: int) -> None:
        entry = self.entries[key]
        offset, entry.blocks[level] = entry.blocks[level], None
        assert offset is not None
        self._move(entry, Residency.EVICTING)
        self.retired.append(Retired(key, level, offset, epoch))

    def _move(self, entry: Entry, state: Residency) -> None:
        assert state in LEGAL_MOVES[entry.state], f"{entry.state.name} -> {state.name} is no legal move"
        entry.state = state


def load_versions(
    experts: VersionedExperts, source: VersionSource, levels: Levels, progress: Callable[[int, int], None]
) -> float:
    """Fill the pools at start-up, every expert at its level of `levels` [layers, experts], and put them in force.

    Returns:
        Bytes per second of the fill: what the source and the link give.

    Raises:
        StoreError or CheckpointError: a version cannot be read or fails its checksum.
    """
    fills = [
        Fill(key, experts.tiers[level], experts.destination(level, offset))
        for key, level, offset in place_versions(experts, levels)
    ]
    bytes_per_second = fill_blocks(source, fills, progress)
    settle_versions(experts)
    return bytes_per_second


def place_versions(experts: VersionedExperts, levels: Levels) -> list[tuple[ExpertKey, int, int]]:
    """Give every expert the blocks it needs at its level of `levels` [layers, experts], at start-up.

    Returns:
        Expert, level and offset of every block.
    """
    below = {experts.lowest} if experts.keep_low else set()
    return [
        (key, level, experts.place(key, level))
        for key in experts.shape.expert_keys()
        for level in sorted({int(levels[key])} | below)
    ]


def settle_versions(experts: VersionedExperts) -> None:
    """Put all experts in force whose blocks `place_versions` gave and somebody filled."""
    for key in experts.shape.expert_keys():
        experts.settle(key)
