"""What happened in a simulated run, and what users would have felt of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dynaexq.policy.hotness import Scores
from dynaexq.simulate.feed import Block

RECOVERED = 0.9
"""Of what a share wins back after a shift: when that much is there, it has recovered."""

POINTS = 60
"""Into which the time after a shift is divided."""


class Spread(NamedTuple):
    """Of times in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Scores) -> Spread | None:
        """None where there are no values."""
        if not len(values):
            return None
        return cls(float(values.mean()), *(float(each) for each in np.percentile(values, (50, 90, 99))))


class Recovery(NamedTuple):
    """A shift of the workload, noticed at `at` seconds: the share of traffic above the lowest tier right then and in
    the end, and seconds until 90 % of the difference was made up."""

    at: float
    before: float
    after: float
    seconds: float


class Passes(NamedTuple):
    """Some forward passes of one kind: seconds and bytes read are those of all."""

    passes: int
    prefill: bool
    tokens: int
    seconds: float
    nbytes: float


class Journal:
    """Sums over all passes, and times of every token."""

    def __init__(self) -> None:
        self.passes = dict.fromkeys((False, True), 0)
        self.tokens = dict.fromkeys((False, True), 0)
        self.busy = dict.fromkeys((False, True), 0.0)
        self.read_bytes = self.loss = 0.0
        self.shifts: list[float] = []
        self._series: list[tuple[float, float, float]] = []  # time, traffic above the lowest tier, all traffic
        self._requests: list[Any] = []
        self._ends: list[Scores] = []
        self._prompts: list[Any] = []
        self._starts: list[Scores] = []

    def note_passes(
        self,
        now: float,
        some: Passes,
        raised: float,
        routed: float,
        loss: float,
    ) -> None:
        """Passes that have just ended: router selections above the lowest tier and in all, and what is lost."""
        self._series.append((now, raised, routed))
        self.passes[some.prefill] += some.passes
        self.tokens[some.prefill] += some.tokens
        self.busy[some.prefill] += some.seconds
        self.read_bytes += some.nbytes
        self.loss += loss

    def note_shifts(self, now: float, count: int) -> None:
        """So many shifts have been noticed by now."""
        self.shifts += [now] * (count - len(self.shifts))

    def note_block(self, block: Block, ends: Scores) -> None:
        """When the passes of a block ended, [passes]."""
        begins = np.concatenate((self._ends[-1][-1:] if self._ends else np.zeros(1), ends[:-1]))
        tokens = block.tokens
        self._requests.append(block.request)
        self._prompts.append(block.prompt)
        self._ends.append(np.repeat(ends, tokens))
        self._starts.append(np.repeat(begins, tokens))

    def latencies(self) -> tuple[Spread | None, Spread | None]:
        """TTFT, from the beginning of a request's first pass to the end of its prompt, and TPOT, between its passes.

        None where the trace has no requests of that kind.
        """
        if not self._ends:
            return None, None
        request, prompt = np.concatenate(self._requests), np.concatenate(self._prompts)
        start, end = np.concatenate(self._starts), np.concatenate(self._ends)
        order = np.lexsort((end, request))
        order = order[request[order] >= 0]
        request, prompt, start, end = request[order], prompt[order], start[order], end[order]
        if not len(request):
            return None, None
        heads = np.flatnonzero(np.diff(request, prepend=request[0] - 1))
        prompts = np.maximum.reduceat(np.where(prompt, end, -np.inf), heads)
        first = prompts - start[heads]
        gaps, same = np.diff(end), np.diff(request) == 0
        between = gaps[same & ~prompt[1:] & (gaps > 0)]
        return Spread.of(first[np.isfinite(first)]), Spread.of(between)

    def recoveries(self) -> list[Recovery]:
        """How the share of traffic above the lowest tier came back after each shift."""
        series = np.array(self._series)
        found = []
        for begin, end in zip(self.shifts, [*self.shifts[1:], float("inf")], strict=False):
            span = series[(series[:, 0] >= begin) & (series[:, 0] < end)]
            if len(span) >= POINTS:
                found.append(_recover(begin, span))
        return found


def _recover(begin: float, span: Scores) -> Recovery:
    """`span`: rows of time, traffic above the lowest tier, all traffic."""
    parts = np.array_split(span, POINTS)
    shares = np.array([part[:, 1].sum() / max(part[:, 2].sum(), 1e-30) for part in parts])
    before, after = float(shares[0]), float(shares[-POINTS // 3 :].mean())
    reached = shares >= before + RECOVERED * (after - before)
    seconds = float(parts[int(reached.argmax())][0, 0] - begin) if after > before else 0.0
    return Recovery(begin, before, after, seconds)
