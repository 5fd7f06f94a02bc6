"""Experts resident in one arena, each at the tier a map gives it, read and checked by several threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from dynaexq.core import (
    MAX_ARENA_BYTES,
    ExpertKey,
    ExpertShape,
    Handle,
    MemoryLimitError,
    ModelShape,
    decode_handle,
    encode_handle,
)
from dynaexq.device import Arena, Device
from dynaexq.device.base import Bytes
from dynaexq.formats import ExpertFormat, VersionLayout
from dynaexq.residency.budget import BudgetTracker
from dynaexq.residency.handles import HandleWords
from dynaexq.residency.pool import BlockPool

READERS = 4


class VersionSource(Protocol):
    """Where versions are copied from: a store, or a checkpoint that is quantised on the way."""

    @property
    def shape(self) -> ModelShape:
        """Layers, experts, and the shape of each expert."""

    def format(self, tier: str) -> ExpertFormat:
        """Format of a tier."""

    def read_into(self, key: ExpertKey, tier: str, destination: Bytes) -> None:
        """Fill `destination` (uint8 [extent_bytes]) with a verified version. Raises StoreError or CheckpointError."""

    def close(self) -> None:
        """Close the files behind the source."""


class ResidentExperts:
    """All experts of a model in device memory, reached through handles.

    `formats` is the table that the format index of a handle word points into.
    """

    def __init__(
        self, source: VersionSource, tiers: Mapping[ExpertKey, str], device: Device, budget: BudgetTracker
    ) -> None:
        """Reserve and allocate the arena; `load` fills it.

        Raises:
            MemoryLimitError: the versions do not fit into what the budget has left.
        """
        self.shape = source.shape
        self.tiers = dict(tiers)
        names = sorted(set(self.tiers.values()))
        self.formats = [source.format(name) for name in names]
        self.layouts = [VersionLayout.of(fmt, self.shape.expert) for fmt in self.formats]
        self.format_index = {name: index for index, name in enumerate(names)}
        self.pools, nbytes = self._plan_pools(names)
        if nbytes > MAX_ARENA_BYTES:
            raise MemoryLimitError(f"{nbytes} bytes of experts are more than a handle can address ({MAX_ARENA_BYTES})")
        budget.reserve("experts", nbytes)
        self.arena: Arena = device.allocate(nbytes)
        self.handles = HandleWords(len(self.tiers))
        self._source = source

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Read every version into its block, then publish its handle. `progress(done, total)` counts experts.

        Raises:
            StoreError: a version cannot be read or fails its checksum.
        """
        keys = self.shape.expert_keys()
        with ThreadPoolExecutor(READERS, thread_name_prefix="dynaexq-read") as readers:
            futures = [readers.submit(self._load_one, key, self._take(key)) for key in keys]
            try:
                for done, future in enumerate(futures, 1):
                    future.result()
                    progress(done, len(keys))
            finally:
                readers.shutdown(cancel_futures=True)

    @property
    def expert(self) -> ExpertShape:
        """Shape of every expert."""
        return self.shape.expert

    def block(self, handle: Handle) -> torch.Tensor:
        """The version behind a handle, uint8 [extent_bytes], in the arena."""
        return self.arena.view(handle.offset, self.layouts[handle.format_index].extent_bytes)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the arena."""
        return self.arena.nbytes

    @property
    def bits_per_weight(self) -> float:
        """Resident bits per expert weight, scales, offsets and padding included."""
        return self.expert_bytes * 8 / self.shape.weights

    def _plan_pools(self, names: list[str]) -> tuple[dict[str, BlockPool], int]:
        pools, base = {}, 0
        for name, layout in zip(names, self.layouts, strict=True):
            count = sum(tier == name for tier in self.tiers.values())
            pools[name] = BlockPool(base, layout.extent_bytes, count)
            base += layout.extent_bytes * count
        return pools, base

    def _take(self, key: ExpertKey) -> int:
        offset = self.pools[self.tiers[key]].take()
        assert offset is not None, "pools are sized for every expert"
        return offset

    def _load_one(self, key: ExpertKey, offset: int) -> None:
        tier = self.tiers[key]
        self._source.read_into(key, tier, self.arena.host_view(offset, self.pools[tier].block_bytes))
        self.handles.publish(self.shape.index(key), encode_handle(self.format_index[tier], offset))

    def check_integrity(self) -> None:
        """Assert that every handle resolves to a block of its own, in the pool of its tier."""
        window, words = self.handles.pin()
        try:
            handles = {key: decode_handle(int(words[self.shape.index(key)])) for key in self.tiers}
        finally:
            self.handles.release(window)
        assert len({handle.offset for handle in handles.values()}) == len(handles)
        for key, handle in handles.items():
            pool = self.pools[self.tiers[key]]
            assert handle.format_index == self.format_index[self.tiers[key]]
            assert 0 <= handle.offset - pool.base < pool.capacity * pool.block_bytes
        for pool in self.pools.values():
            pool.check_integrity()

    def close(self) -> None:
        """Free the arena."""
        self.arena.close()
