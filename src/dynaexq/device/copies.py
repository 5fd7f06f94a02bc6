"""Copies in the background: the migration stream, `stream_mig` of the dynaexq paper (section 3)."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol


class Completion(NamedTuple):
    """A copy that ended: its ticket, and what went wrong (None: it is complete)."""

    ticket: int
    error: Exception | None


class CopyEngine(Protocol):
    """Runs copies one after the other, away from the token path. Submitting and polling never block."""

    busy_seconds: float
    """Spent in copies that ended."""

    def submit(self, ticket: int, nbytes: int, copy: Callable[[], None]) -> None:
        """Queue one copy of `nbytes`; it is complete when the call returns, failed when it raises."""

    def completed(self) -> list[Completion]:
        """Copies that ended since the last call, in the order they ended."""

    def close(self) -> None:
        """Let the running copy end, drop the others."""


class ThreadCopyEngine:
    """A worker thread of its own; reads and checksums in it hold no GIL."""

    def __init__(self, on_completion: Callable[[], None], bytes_per_second: float | None = None) -> None:
        """`on_completion` is called from the worker after each copy: it must not block.

        `bytes_per_second` slows copies down to those of a slower link.
        """
        self._jobs: queue.SimpleQueue[tuple[int, int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._bytes_per_second = bytes_per_second
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._on_completion = on_completion
        self._closing = threading.Event()
        self.busy_seconds = 0.0
        self._worker = threading.Thread(target=self._run, name="dynaexq-copy", daemon=True)
        self._worker.start()

    def submit(self, ticket: int, nbytes: int, copy: Callable[[], None]) -> None:
        self._jobs.put((ticket, nbytes, copy))

    def completed(self) -> list[Completion]:
        ended = []
        while not self._done.empty():
            ended.append(self._done.get())
        return ended

    def close(self) -> None:
        self._closing.set()
        self._jobs.put(None)
        self._worker.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing.is_set():
            ticket, nbytes, copy = job
            error = None
            start = time.monotonic()
            try:
                copy()
            except Exception as raised:
                error = raised
            if self._bytes_per_second is not None:
                self._closing.wait(start + nbytes / self._bytes_per_second - time.monotonic())
            self.busy_seconds += time.monotonic() - start
            self._done.put(Completion(ticket, error))
            self._on_completion()
