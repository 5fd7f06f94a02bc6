"""What this machine can do: memory bandwidth, the link that expert versions come over, and the expert kernels."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dynaexq.core import BLOCK_BYTES, ExpertShape, StoreError, round_up
from dynaexq.device import CpuDevice
from dynaexq.formats import tier_format
from dynaexq.kernels.threads import thread_count
from dynaexq.native import instruction_sets, read_extent, team_kind
from dynaexq.plan.ceilings import EXPERT, TOP_K, RandomExperts, Reading, Work, measure_experts
from dynaexq.store import ExpertStore
from dynaexq.store.files import write_all

REPEATS = 5
CHUNK_BYTES = 1 << 20
"""Read at a time where there is no store: about one expert at int4 of a 30B model."""

TIERS = ("int2", "int4", "int8", "bf16")
TOKENS = 64
"""What `measure_kernels` tells of: the tiers that serve, at one token and at a batch that computing bounds."""


@dataclass(frozen=True)
class MemorySpeed:
    """Bytes per second of all threads together, the best of several passes."""

    read: float
    copy: float


@dataclass(frozen=True)
class LinkSpeed:
    """Bytes per second of checked reads into an arena by one thread, as promotions make them."""

    bytes_per_second: float
    nbytes: int
    direct_io: bool


@dataclass(frozen=True)
class TierSpeed:
    """Medians of one tier: bytes per second at one token, what share of reading that is, and operations per second at
    TOKENS tokens on one expert."""

    bytes_per_second: float
    share_of_read: float
    operations_per_second: float


@dataclass(frozen=True)
class KernelSpeeds:
    """What the kernels reach here, with these instructions and threads (`team`: whose they are)."""

    instructions: str
    threads: int
    team: str
    activations: str
    tiers: dict[str, TierSpeed]


def measure_memory(nbytes: int) -> MemorySpeed:
    """Read and copy `nbytes` of memory."""
    source = torch.ones(max(1, nbytes // 4), dtype=torch.float32)
    target = torch.empty_like(source)
    return MemorySpeed(
        read=source.nbytes / _best(source.sum),
        copy=2 * source.nbytes / _best(lambda: target.copy_(source)),
    )


def measure_store(store: ExpertStore, nbytes: int) -> LinkSpeed:
    """Read experts of a store, tier by tier, until `nbytes` are read. Raises StoreError."""
    extents = []
    for tier, info in store.manifest.tiers.items():
        store.require_tier(tier)
        extents += [(key, tier, info.extent_bytes) for key in store.shape.expert_keys()]
    arena = CpuDevice().allocate(max(size for *_, size in extents))
    done, start = 0, time.perf_counter()
    for key, tier, size in extents:
        store.read_into(key, tier, arena.host_view(0, size))
        done += size
        if done >= nbytes:
            break
    seconds = time.perf_counter() - start
    store.close()
    return LinkSpeed(done / seconds, done, store.direct_io)


def measure_disk(directory: Path, nbytes: int) -> LinkSpeed:
    """Write a file of `nbytes` into `directory`, drop it from the page cache, read it back, remove it.

    Raises:
        StoreError: the directory cannot be written, or the disk is full.
    """
    nbytes = round_up(nbytes, CHUNK_BYTES)
    noise = np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, np.uint8)
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".dynaexq-probe-") as file:
            for _ in range(nbytes // CHUNK_BYTES):
                write_all(file.fileno(), noise.data)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return _read_back(Path(file.name), nbytes)
    except OSError as error:
        raise StoreError(f"cannot write {nbytes} bytes into {directory}: {error.strerror or error}") from error


def measure_kernels(
    nbytes: int, expert: ExpertShape = EXPERT, top_k: int = TOP_K, activations: str = "int8"
) -> KernelSpeeds:
    """Measure the native kernel at TIERS, one after the other; two arenas of `nbytes` are there at a time.

    Raises:
        MemoryLimitError: they do not fit.
    """
    work = Work(batches=(TOKENS,), prefill_tokens=0)
    reading, tiers = Reading(nbytes), {}
    for tier in TIERS:
        experts = RandomExperts(tier_format(tier), expert, nbytes, top_k)
        speed = measure_experts(experts, activations, reading, top_k, work)
        experts.close()
        stream = speed.one_token
        tiers[tier] = TierSpeed(
            stream.bytes_per_second.median, stream.share_of_read.median, speed.batches[TOKENS].median
        )
    return KernelSpeeds(instruction_sets()[0], thread_count(), team_kind(), activations, tiers)


def _read_back(path: Path, nbytes: int) -> LinkSpeed:
    direct = True
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        direct, descriptor = False, os.open(path, os.O_RDONLY)
    arena = CpuDevice().allocate(round_up(CHUNK_BYTES, BLOCK_BYTES))
    try:
        start = time.perf_counter()
        for offset in range(0, nbytes, CHUNK_BYTES):
            done, _ = read_extent(descriptor, offset, arena.host_view(0, CHUNK_BYTES))
            if done != CHUNK_BYTES:
                raise StoreError(f"{path} came back short")
        return LinkSpeed(nbytes / (time.perf_counter() - start), nbytes, direct)
    finally:
        os.close(descriptor)


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
