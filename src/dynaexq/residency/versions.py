"""Versioned Expert Residency: which version of each expert is in force, and the blocks behind it.

One thread, the control thread, calls everything that changes state; any thread may open windows on `handles`.
(dynaexq paper, section 1: VER; section 2: pools.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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

Mask = np.ndarray[tuple[int, int], np.dtype[np.bool_]]

HIGH, LOW = 0, 1
"""Indexes into the format table, the pools and the layouts."""


class Retired(NamedTuple):
    """A block whose handle was switched away at `epoch`."""

    key: ExpertKey
    pool: int
    offset: int
    epoch: int


@dataclass
class Entry:
    """Metadata of one expert: its state, its block by pool (None: not resident), and the block being filled."""

    state: Residency
    blocks: list[int | None]
    filling: int | None = None


class VersionedExperts(ExpertArena):
    """All experts at a low or a high tier, within two pools of fixed blocks.

    The plan says how many blocks each pool has, how many experts of a layer can be high, and whether the low version
    stays resident under a high one (a demotion then copies nothing) or gives its block up (fewer bytes). It stays where
    the high tier is nested in the low one: a block of the high pool then holds what the low version lacks.

    `shares_by_layer` False lets a layer have more high experts for a moment: between two given maps, both of which keep
    to the plan, a way may lead through more of one layer and fewer of another only.
    """

    def __init__(
        self, source: VersionSource, tiers: tuple[str, str], plan: PoolPlan, device: Device, budget: BudgetTracker
    ) -> None:
        """Reserve and allocate the arena. Raises MemoryLimitError when it does not fit the budget."""
        super().__init__(source.shape, [source.format(tier) for tier in tiers])
        assert [layout.extent_bytes for layout in self.layouts] == [plan.high_bytes, plan.low_bytes]
        self.capacity = self._most = plan.capacity
        self.shares_by_layer = True
        self.keep_low = plan.keep_low
        self.nested = self.bases[HIGH] is not None
        assert self.keep_low or not self.nested, "a nested version needs the one it refines"
        high_end = plan.high_bytes * plan.high_blocks
        self.pools = [
            BlockPool(0, plan.high_bytes, plan.high_blocks),
            BlockPool(high_end, plan.low_bytes, plan.low_blocks),
        ]
        self.allocate(plan.nbytes, device, budget)
        self.entries: dict[ExpertKey, Entry] = {}
        self.retired: deque[Retired] = deque()
        self._high_counts = np.zeros(self.shape.layers, np.int64)
        self._high: Mask = np.zeros((self.shape.layers, self.shape.experts), np.bool_)

    def destination(self, pool: int, offset: int) -> Bytes:
        """The block at `offset`, to be filled."""
        return self.arena.host_view(offset, self.pools[pool].block_bytes)

    def place(self, key: ExpertKey, pool: int) -> int:
        """Give an expert that has no version yet a block of `pool`, at start-up; `settle` publishes it once filled."""
        offset = self.pools[pool].take()
        assert offset is not None, "the pools hold every expert"
        entry = self.entries.setdefault(key, Entry(Residency.RESIDENT_LO, [None, None]))
        entry.blocks[pool] = offset
        return offset

    def settle(self, key: ExpertKey) -> None:
        """Put the best version that `place` made resident in force."""
        entry = self.entries[key]
        pool = HIGH if entry.blocks[HIGH] is not None else LOW
        entry.state = Residency.RESIDENT_HI if pool == HIGH else Residency.RESIDENT_LO
        self._high_counts[key.layer] += pool == HIGH
        self._publish(key, pool)

    def try_begin(self, key: ExpertKey, to_high: bool) -> int | None:
        """Reserve a block for a transfer and mark it as begun; None, and no change, where there is none.

        Returns the block's offset, to be filled; `finish` or `abandon` must follow.
        """
        entry = self.entries[key]
        pool = HIGH if to_high else LOW
        if to_high and self.shares_by_layer and self._high_counts[key.layer] >= self.capacity[key.layer]:
            return None
        offset = self.pools[pool].take()
        if offset is None:
            return None
        self._move(entry, Residency.PROMOTING if to_high else Residency.DEMOTING)
        self._high_counts[key.layer] += to_high
        entry.filling = offset
        return offset

    def finish(self, key: ExpertKey) -> None:
        """The transfer is complete and checked: publish it, and retire what it replaces."""
        entry = self.entries[key]
        to_high = entry.state is Residency.PROMOTING
        pool, other = (HIGH, LOW) if to_high else (LOW, HIGH)
        entry.blocks[pool], entry.filling = entry.filling, None
        epoch = self._publish(key, pool)
        if to_high and self.keep_low:
            self._move(entry, Residency.RESIDENT_HI)
        else:
            self._retire(key, entry, other, epoch)

    def abandon(self, key: ExpertKey) -> None:
        """The transfer failed: the old version stays in force, the block is free again."""
        entry = self.entries[key]
        to_high = entry.state is Residency.PROMOTING
        assert entry.filling is not None
        self.pools[HIGH if to_high else LOW].give_back(entry.filling)
        entry.filling = None
        self._high_counts[key.layer] -= to_high
        self._move(entry, Residency.RESIDENT_LO if to_high else Residency.RESIDENT_HI)

    def drop_high(self, key: ExpertKey) -> None:
        """Demote where the low version is resident: switch the handle, copy nothing."""
        entry = self.entries[key]
        assert self.keep_low and entry.blocks[LOW] is not None
        self._retire(key, entry, HIGH, self._publish(key, LOW))

    def resting_low(self, offsets: set[int]) -> list[ExpertKey]:
        """Experts at rest whose low version is in one of the blocks at `offsets`."""
        return [
            key
            for key, entry in self.entries.items()
            if entry.state is Residency.RESIDENT_LO and entry.blocks[LOW] in offsets
        ]

    def relocate(self, key: ExpertKey) -> bool:
        """Copy the low version of an expert at rest to a free low block and retire its old one; False: none is free."""
        entry = self.entries[key]
        old, new = entry.blocks[LOW], self.pools[LOW].take()
        assert entry.state is Residency.RESIDENT_LO and old is not None
        if new is None:
            return False
        self.destination(LOW, new)[:] = self.destination(LOW, old)
        entry.blocks[LOW] = new
        self._move(entry, Residency.EVICTING)
        self.retired.append(Retired(key, LOW, old, self._publish(key, LOW)))
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
            self.pools[item.pool].give_back(item.offset)
            self._high_counts[item.key.layer] -= item.pool == HIGH
            self._move(entry, Residency.RESIDENT_LO if entry.blocks[HIGH] is None else Residency.RESIDENT_HI)
            freed += 1
        return freed

    def high_mask(self) -> Mask:
        """Experts whose handle is on the high version, [layers, experts]."""
        return self._high.copy()

    def check_integrity(self) -> None:
        """Assert the invariants: each handle on a complete block of its own, capacities kept, no block lost."""
        window, words = self.handles.pin()
        handles = {key: decode_handle(int(words[self.shape.index(key)])) for key in self.entries}
        self.handles.release(window)
        held: list[list[int]] = [[], []]
        highs = np.zeros(self.shape.layers, np.int64)
        for key, entry in self.entries.items():
            handle = handles[key]
            seen = handle if handle.residual is None else handle._replace(offset=handle.residual)
            assert entry.blocks[handle.format_index] == seen.offset, f"{key}: the handle is not on a resident version"
            assert handle.residual is None or entry.blocks[LOW] == handle.offset, f"{key}: not on its own low version"
            assert (handle.residual is not None) is (self.nested and handle.format_index == HIGH)
            assert handle.format_index == (HIGH if entry.blocks[HIGH] is not None else LOW)
            assert self._high[key] == (handle.format_index == HIGH)
            moving = entry.state in (Residency.PROMOTING, Residency.DEMOTING)
            assert (entry.filling is not None) is moving, f"{key}: {entry.state} with {entry.filling}"
            if not self.keep_low:
                assert sum(block is not None for block in entry.blocks) == 1
            for pool in (HIGH, LOW):
                held[pool] += [block for block in (entry.blocks[pool],) if block is not None]
            if entry.filling is not None:
                held[HIGH if entry.state is Residency.PROMOTING else LOW].append(entry.filling)
            highs[key.layer] += entry.blocks[HIGH] is not None or entry.state is Residency.PROMOTING
        for item in self.retired:
            held[item.pool].append(item.offset)
            highs[item.key.layer] += item.pool == HIGH
            assert self.entries[item.key].state is Residency.EVICTING
        assert len(self.retired) == sum(entry.state is Residency.EVICTING for entry in self.entries.values())
        assert np.array_equal(highs, self._high_counts)
        assert not self.shares_by_layer or (highs <= self._most).all()
        for blocks, offsets in zip(self.pools, held, strict=True):
            blocks.check_integrity()
            assert len(set(offsets)) == len(offsets) == blocks.capacity - blocks.free, "a block is lost or in two hands"

    def _publish(self, key: ExpertKey, pool: int) -> int:
        blocks = self.entries[key].blocks
        offset, residual = (blocks[LOW], blocks[HIGH]) if self.nested and pool == HIGH else (blocks[pool], None)
        assert offset is not None
        self._high[key] = pool == HIGH
        return self.handles.publish(self.shape.index(key), encode_handle(pool, offset, residual))

    def _retire(self, key: ExpertKey, entry: Entry, pool: int, epoch: int) -> None:
        offset = entry.blocks[pool]
        assert offset is not None
        entry.blocks[pool] = None
        self._move(entry, Residency.EVICTING)
        self.retired.append(Retired(key, pool, offset, epoch))

    def _move(self, entry: Entry, state: Residency) -> None:
        assert state in LEGAL_MOVES[entry.state], f"{entry.state.name} -> {state.name} is no legal move"
        entry.state = state


def load_versions(
    experts: VersionedExperts,
    source: VersionSource,
    tiers: tuple[str, str],
    high: Mask,
    progress: Callable[[int, int], None],
) -> float:
    """Fill both pools at start-up, the experts of `high` [layers, experts] high, and put them in force.

    Returns:
        Bytes per second of the fill: what the source and the link give.

    Raises:
        StoreError or CheckpointError: a version cannot be read or fails its checksum.
    """
    assert (high.sum(1) <= experts.capacity).all()
    fills = []
    for key in experts.shape.expert_keys():
        for pool in [HIGH] * bool(high[key]) + [LOW] * bool(experts.keep_low or not high[key]):
            fills.append(Fill(key, tiers[pool], experts.destination(pool, experts.place(key, pool))))
    bytes_per_second = fill_blocks(source, fills, progress)
    for key in experts.shape.expert_keys():
        experts.settle(key)
    return bytes_per_second
