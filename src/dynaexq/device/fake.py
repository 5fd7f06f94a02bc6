"""A device whose copies end when they are told to: for state-machine tests and the simulator."""

from __future__ import annotations

from collections.abc import Callable

from dynaexq.device.copies import Completion


class FakeCopyEngine:
    """Copies queue up; `end` runs or fails one of them, in any order."""

    def __init__(self) -> None:
        self.running: dict[int, Callable[[], None]] = {}
        self._ended: list[Completion] = []
        self.busy_seconds = 0.0

    def submit(self, ticket: int, nbytes: int, copy: Callable[[], None]) -> None:
        self.running[ticket] = copy

    def completed(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def end(self, ticket: int, error: Exception | None = None) -> None:
        """Let a copy end: complete it, or fail it with `error`, its destination half written."""
        copy = self.running.pop(ticket)
        if error is None:
            copy()
        self._ended.append(Completion(ticket, error))

    def close(self) -> None:
        self.running.clear()
