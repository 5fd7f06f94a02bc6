"""What a device offers: one arena of expert memory, and copies of versions into it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Arena(Protocol):
    """One allocation, made at start, that every block of expert memory is cut from."""

    nbytes: int

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the device, sharing memory with the arena."""

    def host_view(self, offset: int, nbytes: int) -> Bytes:
        """The same bytes, writable by host code (a staging buffer where the device is not the host)."""

    def release(self, offset: int, nbytes: int) -> None:
        """Give whole pages back to the system: they read as zeros, and come back as they are written."""

    def close(self) -> None:
        """Give the memory back. No view may be used afterwards."""


class Device(Protocol):
    """A place to compute and to keep expert versions."""

    name: str

    def allocate(self, nbytes: int) -> Arena:
        """Allocate the arena. Raises MemoryLimitError when the system refuses."""
