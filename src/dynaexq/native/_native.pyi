from typing import Any

import numpy as np
from numpy.typing import NDArray

class HandleTable:
    """Fixed table of 64-bit handle words; see handles.hpp for the memory order."""

    def __init__(self, size: int) -> None: ...
    def __len__(self) -> int: ...
    def load(self, index: int) -> int: ...
    def publish(self, index: int, word: int) -> int:
        """Store one word atomically; return the epoch to pass to `drained` before reuse."""

    def pin(self, out: NDArray[np.uint64]) -> int:
        """Open a window: copy all words into `out` [size]; return its slot. RuntimeError past 64 windows."""

    def release(self, slot: int) -> None: ...
    def drained(self, epoch: int) -> bool: ...
    def live_windows(self) -> int: ...

def read_extent(fd: int, offset: int, destination: Any) -> tuple[int, int]:
    """Fill `destination` (writable uint8 [n]) from `fd`; return (bytes read, CRC-32C). OSError with errno."""

def crc32c(data: Any, crc: int = 0) -> int:
    """CRC-32C of a uint8 array [n], continuing `crc`."""

def crc32c_portable(data: Any, crc: int = 0) -> int: ...
def limit_malloc() -> None:
    """Keep glibc from hoarding freed memory (few arenas, low mmap and trim thresholds)."""
