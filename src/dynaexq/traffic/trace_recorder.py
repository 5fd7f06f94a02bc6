"""Records a run's routing as it goes: windows are handed over by reference, and a thread of its own writes them."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from dynaexq.core import ModelShape
from dynaexq.formats import ExpertFormat, VersionLayout
from dynaexq.formats.base import base_tier
from dynaexq.traffic.recorder import ClosedWindow, RoutedLayer, TokenRun
from dynaexq.traffic.trace import Column, TraceHead, TraceRows
from dynaexq.traffic.trace_writer import TraceWriter

MAX_WAITING_BYTES = 32 << 20
"""Of ids and weights that wait to be written (with hidden states, four times that): more, and the recording ends."""

PAUSE_SECONDS = 0.25
"""Between two writes: windows of one kind are put together, which costs less than one by one."""


class RecordedExperts(Protocol):
    """What a recording says of the experts of a run."""

    shape: ModelShape
    formats: list[ExpertFormat]
    layouts: list[VersionLayout]


class TraceRecorder:
    """Writes every window it is given. `after_window` may be called from any thread, and never waits.

    What goes wrong ends the recording, with one warning. What was written by then is kept, if the file can be ended.
    """

    def __init__(
        self, path: Path, model: str, fingerprint: str, experts: RecordedExperts, hidden: bool = False
    ) -> None:
        """Begin a trace of `model`, from a checkpoint with this fingerprint; the file begins with the first window.

        `hidden`: windows also say what routers were given, and it is written.
        """
        self.hidden = hidden
        self.problem: str | None = None
        self._path, self._model, self._fingerprint, self._experts = path, model, fingerprint, experts
        self._writer: TraceWriter | None = None
        self._builder: RowBuilder | None = None
        self._waiting: deque[ClosedWindow] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="dynaexq-trace", daemon=True)
        self._thread.start()

    @property
    def tokens(self) -> int:
        """Rows that are written."""
        return self._writer.tokens if self._writer else 0

    def after_window(self, window: ClosedWindow) -> None:
        """Take a window."""
        if self.problem is not None or not window.layers or len(window.layers) % self._experts.shape.layers:
            return  # a forward pass that failed has fewer layers: it routed nothing that was used
        first = window.layers[0]
        each = first.ids.nbytes + first.weights.nbytes + (0 if first.hidden is None else first.hidden.nbytes)
        nbytes, most = len(window.layers) * each + window.levels.nbytes, MAX_WAITING_BYTES * (4 if self.hidden else 1)
        with self._changed:
            self._waiting.append(window)
            self._waiting_bytes += nbytes
            if 2 * self._waiting_bytes > most:
                self._changed.notify_all()
            if self._waiting_bytes > most:
                self._fail("it cannot be written as fast as it comes")

    def close(self) -> None:
        """Write what waits, and finish the file; further calls do nothing. Raises SideFileError where that fails."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if self._writer is not None and not self._writer.abandoned:
            self._writer.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._closing:
                    self._changed.wait(PAUSE_SECONDS)
                windows, closing = list(self._waiting), self._closing
                self._waiting.clear()
                self._waiting_bytes = 0
            try:
                self._write(windows)
            except Exception as error:  # whatever it is, the run goes on and learns why its recording does not
                self._fail(str(error) or type(error).__name__)
            if closing:
                return

    def _write(self, windows: list[ClosedWindow]) -> None:
        if not windows or self.problem is not None:
            return
        if self._builder is None:
            self._builder = RowBuilder(self._make_head(windows[0]), _read_sizes(self._experts))
            self._writer = TraceWriter(self._path, self._builder.head, weights=True, hidden=self.hidden)
        for rows in self._builder.build(windows):
            assert self._writer is not None
            self._writer.add(rows)

    def _make_head(self, window: ClosedWindow) -> TraceHead:
        shape, experts = self._experts.shape, self._experts
        return TraceHead(
            model=self._model,
            fingerprint=self._fingerprint,
            layers=shape.layers,
            experts=shape.experts,
            top_k=window.layers[0].ids.shape[-1],
            hidden=shape.expert.hidden,
            intermediate=shape.expert.intermediate,
            tiers={fmt.name: each.extent_bytes for fmt, each in zip(experts.formats, experts.layouts, strict=True)},
        )

    def _fail(self, reason: str) -> None:
        if self.problem is None:
            self.problem = f"the trace {self._path} ends here: {reason}"
            warnings.warn(self.problem, stacklevel=2)


class RowBuilder:
    """Makes rows of windows, which it numbers."""

    def __init__(self, head: TraceHead, version_bytes: Column) -> None:
        self.head, self._version_bytes = head, version_bytes
        self._windows = 0
        self._began: float | None = None

    def build(self, windows: Sequence[ClosedWindow]) -> list[TraceRows]:
        """Rows of windows, in their order; those of one shape together."""
        return [self._build(list(group)) for _, group in groupby(windows, self._shape_of)]

    def _shape_of(self, window: ClosedWindow) -> tuple[int, ...]:
        """Tokens of each forward."""
        return tuple(routed.ids.shape[0] for routed in window.layers[:: self.head.layers])

    def _build(self, windows: list[ClosedWindow]) -> TraceRows:
        """Of windows of the same forwards, each over as many tokens."""
        if self._began is None:
            self._began = windows[0].opened
        count, layers = len(windows), self.head.layers
        ids, weights = (_assemble(windows, layers, name) for name in ("ids", "weights"))
        tokens = ids.shape[1]
        prefill, request = self._labels(windows, tokens)
        numbers = np.arange(self._windows, self._windows + count, dtype=np.int32)
        self._windows += count
        started = np.array([window.opened - self._began for window in windows])
        seconds = np.array([window.seconds for window in windows], np.float32)
        nbytes, seen = self._read(windows, ids), windows[0].layers[0].hidden is not None
        flat = (count * tokens, layers, -1)
        return TraceRows(
            window=np.repeat(numbers, tokens),
            started=np.repeat(started, tokens),
            seconds=np.repeat(seconds, tokens),
            prefill=prefill,
            request=request,
            expert_bytes=np.repeat(nbytes, tokens),
            ids=ids.reshape(flat).astype(np.uint16),
            weights=weights.reshape(flat),
            hidden=_assemble(windows, layers, "hidden").reshape(flat) if seen else None,
        )

    def _labels(self, windows: list[ClosedWindow], tokens: int) -> tuple[Column, Column]:
        """Whether tokens belong to prompts, and to which requests."""
        runs: list[TokenRun] = []
        for window in windows:
            known = sum([run.tokens for run in window.runs]) == tokens
            runs += window.runs if known else (TokenRun(-1, tokens, window.prefill),)
        request, lengths, prefill = zip(*runs, strict=True)
        return np.repeat(prefill, lengths), np.repeat(np.array(request, np.int32), lengths)

    def _read(self, windows: list[ClosedWindow], ids: Column) -> Column:
        """Bytes of distinct versions that each window read; `ids` is [windows, tokens, layers, top_k]."""
        head, count = self.head, len(windows)
        places = ids.astype(np.int64) + (head.experts * np.arange(head.layers))[:, None]
        used = np.zeros((count, head.layers * head.experts), np.bool_)
        used[np.arange(count)[:, None], places.reshape(count, -1)] = True
        sizes = self._version_bytes[np.stack([window.levels for window in windows])]
        return np.asarray((sizes * used).sum(1))


def _read_sizes(experts: RecordedExperts) -> Column:
    """Bytes that a pass reads of a version, by format index: nested ones with what they refine."""
    by_name = {fmt.name: each.extent_bytes for fmt, each in zip(experts.formats, experts.layouts, strict=True)}
    bases = [base_tier(fmt.name) for fmt in experts.formats]
    own = [by_name[fmt.name] for fmt in experts.formats]
    return np.array([size + (by_name[base] if base else 0) for size, base in zip(own, bases, strict=True)], np.int64)


def _assemble(windows: list[ClosedWindow], layers: int, name: str) -> Column:
    """Ids, weights or hidden states, [windows, tokens, layers, width]: the forwards of a window one after the other."""
    forwards = len(windows[0].layers) // layers
    parts = []
    for forward in range(forwards):
        routed: list[RoutedLayer] = [
            each for window in windows for each in window.layers[forward * layers : (forward + 1) * layers]
        ]
        tokens = routed[0].ids.shape[0]
        whole = torch.cat([getattr(each, name) for each in routed]).detach()
        values = (whole.float() if name == "weights" else whole).numpy()
        parts.append(values.reshape(len(windows), layers, tokens, -1).transpose(0, 2, 1, 3))
    return np.concatenate(parts, 1)
