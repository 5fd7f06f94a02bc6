"""A device without memory, in virtual time: copies take as long as their bytes do over a link. For the simulator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from dynaexq.device.base import Bytes
from dynaexq.device.copies import Completion


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def reach(self, time: float) -> None:
        """Let time pass until `time`, unless it has already."""
        self.now = max(self.now, time)


class _Copy(NamedTuple):
    end: float
    ticket: int
    seconds: float


class VirtualLink:
    """Copies one after the other, at `bytes_per_second` and `latency` seconds each; nothing is copied."""

    def __init__(self, clock: VirtualClock, bytes_per_second: float, latency: float = 0.0) -> None:
        assert bytes_per_second > 0
        assert latency >= 0
        self.busy_seconds = 0.0
        self._clock, self._bytes_per_second, self._latency = clock, bytes_per_second, latency
        self._running: deque[_Copy] = deque()
        self._ended: deque[_Copy] = deque()
        self._free_at = 0.0

    @property
    def next_end(self) -> float:
        """When the copy that runs will end; infinite where none does."""
        return self._running[0].end if self._running else float("inf")

    def submit(self, ticket: int, nbytes: int, copy: Callable[[], None]) -> None:
        seconds = self._latency + nbytes / self._bytes_per_second
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self._running.append(_Copy(self._free_at, ticket, seconds))

    def completed(self) -> list[Completion]:
        ended = []
        while self.next_end <= self._clock.now:
            copy = self._running.popleft()
            self.busy_seconds += copy.seconds
            self._ended.append(copy)
            ended.append(Completion(copy.ticket, None))
        return ended

    def busy_since(self, start: float) -> float:
        """Seconds of copies between `start` and now. No later call looks further back."""
        while self._ended and self._ended[0].end <= start:
            self._ended.popleft()
        spans = ((copy.end - copy.seconds, copy.end) for copy in (*self._ended, *self._running))
        return sum(max(0.0, min(end, self._clock.now) - max(begin, start)) for begin, end in spans)

    def close(self) -> None:
        self._running.clear()


class VirtualWake:
    """Waits of a control loop in virtual time: until the next copy ends, or as long as it is ready to wait."""

    def __init__(self, clock: VirtualClock, link: VirtualLink) -> None:
        self.woken = False
        self._clock, self._link = clock, link

    def set(self) -> None:
        self.woken = True

    def clear(self) -> None:
        self.woken = False

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.reach(min(self._link.next_end, self._clock.now + (timeout or 0.0)))
        return self.woken


@cache
def _zeros(nbytes: int) -> Bytes:
    return np.broadcast_to(np.zeros(1, np.uint8), (nbytes,))


class VirtualArena:
    """Offsets without bytes behind them: views have the right size and read as zeros."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8).expand(nbytes)

    def host_view(self, offset: int, nbytes: int) -> Bytes:
        return _zeros(nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """There is nothing to give back."""

    def close(self) -> None:
        """There is nothing to free."""


class VirtualDevice:
    """Arenas of any size."""

    name = "virtual"

    def allocate(self, nbytes: int) -> VirtualArena:
        return VirtualArena(nbytes)
