"""What experts that stay and experts that move have in common: one arena, handles into it, and filling its blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch

from dynaexq.core import MAX_ARENA_BYTES, ExpertKey, ExpertShape, Handle, MemoryLimitError, ModelShape
from dynaexq.device import Arena, Device
from dynaexq.device.base import Bytes
from dynaexq.formats import ExpertFormat, ExpertWeights, VersionLayout, decode
from dynaexq.formats.codec import Base
from dynaexq.residency.budget import BudgetTracker
from dynaexq.residency.handles import HandleWords
from dynaexq.residency.pool import BlockPool
from dynaexq.store.sensitivity import Sensitivity

READERS = 4


class VersionSource(Protocol):
    """Where versions are copied from: a store, or a checkpoint that is quantised on the way."""

    @property
    def shape(self) -> ModelShape:
        """Layers, experts, and the shape of each expert."""

    @property
    def fingerprint(self) -> str:
        """Of the checkpoint that the versions were made from."""

    @property
    def sensitivity(self) -> Sensitivity | None:
        """What versions lose, where calibration measured it."""

    def format(self, tier: str) -> ExpertFormat:
        """Format of a tier."""

    def require_tier(self, tier: str) -> None:
        """Get ready to read versions of a tier. Raises StoreError where they are missing or unfit."""

    def read_into(self, key: ExpertKey, tier: str, destination: Bytes) -> None:
        """Fill `destination` (uint8 [extent_bytes]) with a verified version. Raises StoreError or CheckpointError."""

    def missing_files(self) -> list[str]:
        """Files behind the source that are gone (what is open can still be read, but not after a restart)."""

    def close(self) -> None:
        """Close the files behind the source."""


class Fill(NamedTuple):
    """One block to be filled at start-up."""

    key: ExpertKey
    tier: str
    destination: Bytes


def fill_blocks(source: VersionSource, fills: list[Fill], progress: Callable[[int, int], None]) -> float:
    """Read all of `fills` with several threads; `progress(done, total)`. Raises StoreError or CheckpointError.

    Returns bytes per second.
    """
    start = time.perf_counter()
    with ThreadPoolExecutor(READERS, thread_name_prefix="dynaexq-read") as readers:
        futures = [readers.submit(source.read_into, *fill) for fill in fills]
        try:
            for done, future in enumerate(futures, 1):
                future.result()
                progress(done, len(fills))
        finally:
            readers.shutdown(cancel_futures=True)
    return sum(fill.destination.nbytes for fill in fills) / (time.perf_counter() - start)


class ExpertArena:
    """Versions of all experts in one allocation, reached through handles.

    `formats` is the table that the format index of a handle word points into; `pools` has one pool for each of them,
    and `bases` the index of what each is nested in (None: it stands alone).
    """

    def __init__(self, shape: ModelShape, formats: list[ExpertFormat]) -> None:
        self.shape = shape
        self.formats = formats
        self.layouts = [VersionLayout.of(fmt, shape.expert) for fmt in formats]
        plain = {fmt.bits: index for index, fmt in enumerate(formats) if not (fmt.base_bits or fmt.down_bits)}
        self.bases = [plain.get(fmt.base_bits) for fmt in formats]
        self.handles = HandleWords(shape.layers * shape.experts)
        self.pools: list[BlockPool] = []
        self._released = 0
        self.arena: Arena

    def allocate(self, nbytes: int, device: Device, budget: BudgetTracker) -> None:
        """Reserve, then allocate. Raises MemoryLimitError when it does not fit the budget or a handle word."""
        if nbytes > MAX_ARENA_BYTES:
            raise MemoryLimitError(f"{nbytes} bytes of experts are more than a handle can address ({MAX_ARENA_BYTES})")
        budget.reserve("experts", nbytes)
        self.arena = device.allocate(nbytes)
        self._budget = budget

    def release_memory(self, offset: int, nbytes: int) -> None:
        """Give pages of the arena, and their part of the budget, back."""
        self.arena.release(offset, nbytes)
        self._budget.release("experts", nbytes)
        self._released += nbytes

    def regain_memory(self, nbytes: int) -> bool:
        """Reserve what was given back again; False where the budget has no room for it."""
        if not self._budget.try_reserve("experts", nbytes):
            return False
        self._released -= nbytes
        return True

    @property
    def expert(self) -> ExpertShape:
        """Shape of every expert."""
        return self.shape.expert

    @property
    def expert_bytes(self) -> int:
        """Bytes of the arena that are in use."""
        return self.arena.nbytes - self._released

    @property
    def bits_per_weight(self) -> float:
        """Bits of the arena per expert weight, scales, offsets, padding and spare blocks included."""
        return self.expert_bytes * 8 / self.shape.weights

    @property
    def padding_bytes(self) -> int:
        """Internal fragmentation: bytes of the arena that pad versions to whole blocks."""
        pairs = zip(self.pools, self.layouts, strict=True)
        return sum(pool.capacity * (layout.extent_bytes - layout.payload_bytes) for pool, layout in pairs)

    def block(self, handle: Handle) -> torch.Tensor:
        """The version behind a handle, uint8 [extent_bytes], in the arena; of a nested one, what it refines."""
        base = self.bases[handle.format_index]
        layout = self.layouts[handle.format_index if base is None else base]
        return self.arena.view(handle.offset, layout.extent_bytes)

    def weights(self, handle: Handle) -> ExpertWeights:
        """Plain float32 weights of the version behind a handle."""
        fmt, base = self.formats[handle.format_index], self.bases[handle.format_index]
        if base is None:
            return decode(self.block(handle), fmt, self.expert)
        assert handle.residual is not None
        rest = self.arena.view(handle.residual, self.layouts[handle.format_index].extent_bytes)
        return decode(rest, fmt, self.expert, Base(self.block(handle), self.formats[base]))

    def close(self) -> None:
        """Free the arena."""
        self.arena.close()
