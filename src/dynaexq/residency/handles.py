"""The handle table: one 64-bit word per expert (see core.encode_handle), and the windows that read it."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynaexq.core import Window
from dynaexq.native import HandleTable

Words = np.ndarray[Any, np.dtype[np.uint64]]


class HandleWords:
    """The handle table with its windows (dynaexq paper, section 1: stable handle, window-level pinning)."""

    def __init__(self, size: int) -> None:
        self._table = HandleTable(size)
        self._buffers: dict[int, Words] = {}
        self._spare: list[Words] = []
        self._size = size

    def publish(self, index: int, word: int) -> int:
        """Put `word` in force from the next window on; returns the epoch to drain before reuse of the old block."""
        return self._table.publish(index, word)

    def pin(self) -> tuple[Window, Words]:
        """Open a window: the words [size] stay as they are until it is released."""
        words = self._spare.pop() if self._spare else np.empty(self._size, np.uint64)
        slot = self._table.pin(words)
        self._buffers[slot] = words
        return Window(slot), words

    def formats(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """The format of every version in force [size]."""
        window, words = self.pin()
        formats = words >> np.uint64(56)
        self.release(window)
        return formats

    def release(self, window: Window) -> None:
        """End a window; its words must not be used afterwards."""
        self._table.release(window.slot)
        self._spare.append(self._buffers.pop(window.slot))

    def drained(self, epoch: int) -> bool:
        """Whether no live window can still see what a publish at `epoch` replaced."""
        return self._table.drained(epoch)
