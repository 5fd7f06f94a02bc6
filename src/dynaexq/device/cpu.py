"""The CPU device: expert memory is one anonymous mapping of real, resident memory."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

from dynaexq.core import BLOCK_BYTES, MemoryLimitError, round_up
from dynaexq.device.base import Bytes


class CpuArena:
    """An anonymous mapping, page-aligned (so fit for direct I/O), huge pages advised."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        size = max(round_up(nbytes, BLOCK_BYTES), BLOCK_BYTES)
        self._mapping = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones get no huge pages
        with contextlib.suppress(OSError):  # kernels without huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Bytes = np.frombuffer(self._mapping, np.uint8)
        self._tensor = torch.from_numpy(self._bytes)

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._tensor[offset : offset + nbytes]

    def host_view(self, offset: int, nbytes: int) -> Bytes:
        return self._bytes[offset : offset + nbytes]

    def release(self, offset: int, nbytes: int) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED, offset, nbytes)

    def close(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # a view is still alive somewhere: freed with it
            self._mapping.close()


class CpuDevice:
    """Host memory as the device."""

    name = "cpu"

    def allocate(self, nbytes: int) -> CpuArena:
        """Allocate the arena. Raises MemoryLimitError when the system refuses."""
        try:
            return CpuArena(nbytes)
        except OSError as error:
            raise MemoryLimitError(f"the system refuses {nbytes} bytes for experts: {error.strerror}") from error
