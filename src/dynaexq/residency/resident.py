"""Experts resident in one arena, each at the tier a map gives it, read and checked by several threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynaexq.core import ExpertKey, decode_handle, encode_handle
from dynaexq.device import Device
from dynaexq.formats import tier_rank
from dynaexq.residency.arena import ExpertArena, Fill, VersionSource, fill_blocks
from dynaexq.residency.budget import BudgetTracker
from dynaexq.residency.pool import BlockPool


class ResidentExperts(ExpertArena):
    """All experts of a model in device memory, each at the tier it keeps; the format table starts at the highest."""

    def __init__(
        self, source: VersionSource, tiers: Mapping[ExpertKey, str], device: Device, budget: BudgetTracker
    ) -> None:
        """Reserve and allocate the arena; `load` fills it.

        Raises:
            MemoryLimitError: the versions do not fit into what the budget has left.
        """
        self.tiers = dict(tiers)
        names = sorted(set(self.tiers.values()), key=tier_rank, reverse=True)
        super().__init__(source.shape, [source.format(name) for name in names])
        self.format_index = {name: index for index, name in enumerate(names)}
        self.allocate(self._plan_pools(names), device, budget)
        self._source = source

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Read every version into its block, then publish the handles. `progress(done, total)` counts experts.

        Raises:
            StoreError: a version cannot be read or fails its checksum.
        """
        offsets = {key: self._take(key) for key in self.shape.expert_keys()}
        fills = [
            Fill(key, self.tiers[key], self.arena.host_view(offset, self._pool(key).block_bytes))
            for key, offset in offsets.items()
        ]
        fill_blocks(self._source, fills, progress)
        for key, offset in offsets.items():
            self.handles.publish(self.shape.index(key), encode_handle(self.format_index[self.tiers[key]], offset))

    def _plan_pools(self, names: list[str]) -> int:
        """Make a pool for each tier; returns the bytes of all."""
        base = 0
        for name, layout in zip(names, self.layouts, strict=True):
            count = sum(tier == name for tier in self.tiers.values())
            self.pools.append(BlockPool(base, layout.extent_bytes, count))
            base += layout.extent_bytes * count
        return base

    def _pool(self, key: ExpertKey) -> BlockPool:
        return self.pools[self.format_index[self.tiers[key]]]

    def _take(self, key: ExpertKey) -> int:
        offset = self._pool(key).take()
        assert offset is not None, "pools are sized for every expert"
        return offset

    def check_integrity(self) -> None:
        """Assert that every handle resolves to a block of its own, in the pool of its tier."""
        window, words = self.handles.pin()
        try:
            handles = {key: decode_handle(int(words[self.shape.index(key)])) for key in self.tiers}
        finally:
            self.handles.release(window)
        assert len({handle.offset for handle in handles.values()}) == len(handles)
        for key, handle in handles.items():
            pool = self._pool(key)
            assert handle.format_index == self.format_index[self.tiers[key]]
            assert pool.holds(handle.offset)
        for pool in self.pools:
            pool.check_integrity()
