"""How fast the last minute went: what people look at, where Prometheus is not at hand."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dynaexq.engine import FinishEvent, StepReport

SECONDS = 60.0


class _Step(NamedTuple):
    at: float
    seconds: float
    prompt_tokens: int
    decoded_tokens: int


class _End(NamedTuple):
    at: float
    queue: float
    ttft: float
    tpot: float | None


class Pace:
    """An engine's observer that forgets after a minute. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._start = clock, clock()
        self._lock = threading.Lock()
        self._steps: deque[_Step] = deque()
        self._ends: deque[_End] = deque()
        self._count, self._busy = 0, 0.0

    def on_step(self, report: StepReport) -> None:
        """A step is done."""
        step = _Step(self._clock(), report.seconds, report.prompt_tokens, report.decoded_tokens)
        with self._lock:
            self._count += 1
            self._busy += report.seconds
            self._steps.append(step)
            _forget(self._steps, step.at - SECONDS)

    def on_finish(self, event: FinishEvent) -> None:
        """A sequence has ended."""
        if event.ttft_seconds is None:
            return
        end = _End(self._clock(), event.queue_seconds, event.ttft_seconds, event.tpot_seconds)
        with self._lock:
            self._ends.append(end)
            _forget(self._ends, end.at - SECONDS)

    def describe(self) -> dict[str, Any]:
        """Tokens per second, and percentiles in seconds (None: nothing of the kind happened)."""
        now = self._clock()
        with self._lock:
            _forget(self._steps, now - SECONDS)
            _forget(self._ends, now - SECONDS)
            steps, ends = list(self._steps), list(self._ends)
        seconds = min(SECONDS, max(now - self._start, 1e-3))
        return {
            "seconds": seconds,
            "tokens_per_second": sum(step.decoded_tokens for step in steps) / seconds,
            "prompt_tokens_per_second": sum(step.prompt_tokens for step in steps) / seconds,
            "queue": _percentiles([end.queue for end in ends]),
            "ttft": _percentiles([end.ttft for end in ends]),
            "tpot": _percentiles([end.tpot for end in ends if end.tpot is not None]),
            "step": _percentiles([step.seconds for step in steps]),
        }

    def describe_steps(self) -> dict[str, float]:
        """How many steps there were since the start, and what they took together."""
        with self._lock:
            return {"count": self._count, "seconds": self._busy}


def _forget(row: deque[Any], before: float) -> None:
    while row and row[0].at < before:
        row.popleft()


def _percentiles(seconds: list[float]) -> dict[str, float] | None:
    """And of how many."""
    if not seconds:
        return None
    median, high = np.percentile(seconds, (50, 99)).tolist()
    return {"p50": median, "p99": high, "count": len(seconds)}
