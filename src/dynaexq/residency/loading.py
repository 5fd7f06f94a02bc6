"""Threads that read experts into blocks, over a link that can be made slower."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Load(NamedTuple):
    """One read: expert `place` into the block at `offset` of shelf `shelf`; `ahead`: nobody waits for it yet."""

    shelf: int
    place: int
    offset: int
    ahead: bool


@dataclass
class LoadCounters:
    """Reads that ended: how many, those begun ahead, and their seconds, where reads go on side by side of all."""

    loads: int = 0
    ahead: int = 0
    seconds: float = 0.0

    def describe(self, waited: float) -> dict[str, float]:
        """The same, and which share of their time was hidden, where layers waited for so many seconds."""
        return {
            "loads": self.loads,
            "loads_ahead": self.ahead,
            "load_seconds": self.seconds,
            "hidden": max(0.0, 1 - waited / self.seconds) if self.seconds else 0.0,
        }


class SlowLink:
    """A link that carries one thing after the other, at so many bytes per second; None: it is as fast as reads are."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate, self._free_at = bytes_per_second, 0.0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> tuple[float, float]:
        """When so many bytes begin and end to be carried, by time.monotonic()."""
        with self._lock:
            begin = now = time.monotonic()
            if self._rate is None:
                return now, now
            begin = max(now, self._free_at)
            self._free_at = begin + nbytes / self._rate
            return begin, self._free_at


class Readers:
    """Threads that run loads as `find` gives them, which is asked under `changed`."""

    def __init__(
        self,
        count: int,
        changed: threading.Condition,
        find: Callable[[], Load | None],
        run: Callable[[Load], None],
        ended: Callable[[], None],
    ) -> None:
        """`ended` is called when the last of them has."""
        self._changed, self._find, self._run, self._ended = changed, find, run, ended
        self._closing, self._alive = False, count
        self._threads = [
            threading.Thread(target=self._work, name=f"dynaexq-read-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begin no more loads. A collector of garbage may call this in any thread: nothing is waited for."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self) -> None:
        """Begin no more loads, and let those that run end."""
        self.stop()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (load := self._wait()) is not None:
            self._run(load)
        with self._changed:
            self._alive -= 1
            if self._alive:
                return
        self._ended()

    def _wait(self) -> Load | None:
        """The next load; None at the end."""
        with self._changed:
            while not self._closing:
                if (load := self._find()) is not None:
                    return load
                self._changed.wait()
            return None
