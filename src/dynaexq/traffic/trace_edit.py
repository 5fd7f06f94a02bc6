"""Traces made of traces: a part of one, or several in a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dynaexq.core import OptionError, SideFileError
from dynaexq.traffic.trace import TraceHead, TraceReader, TraceRows
from dynaexq.traffic.trace_writer import TraceWriter


class Part(NamedTuple):
    """What of a trace is kept: passes and requests from..before (None: all), tokens of one kind, so many of them."""

    windows: tuple[int, int] | None = None
    requests: tuple[int, int] | None = None
    prefill: bool | None = None
    tokens: int | None = None

    def choose(self, rows: TraceRows, seen: int) -> TraceRows:
        """The rows that belong to it, where `seen` of them came before."""
        mask = np.ones(len(rows.window), np.bool_)
        for column, span in ((rows.window, self.windows), (rows.request, self.requests)):
            if span is not None:
                mask &= (column >= span[0]) & (column < span[1])
        if self.prefill is not None:
            mask &= rows.prefill == self.prefill
        chosen = np.flatnonzero(mask)
        return rows.cut(chosen if self.tokens is None else chosen[: max(0, self.tokens - seen)])


def parse_span(text: str | None, option: str) -> tuple[int, int] | None:
    """`A:B`, either end may be left out. Raises OptionError."""
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        span = int(first or 0), int(last) if last else 1 << 62
    except ValueError:
        span = (0, 0)
    if not colon or not 0 <= span[0] < span[1]:
        raise OptionError(f"{option} {text}: write FROM:BEFORE, such as 0:100 or 50:")
    return span


def slice_trace(source: Path, part: Part, target: Path) -> int:
    """Write a part of a trace; returns its tokens. Raises SideFileError, OptionError where nothing is left."""
    reader = TraceReader.open(source)

    def rows() -> Iterator[TraceRows]:
        seen = 0
        for each in reader.batches(weights=True, hidden=True):
            chosen = part.choose(each, seen)
            seen += len(chosen.window)
            if len(chosen.window):
                yield chosen

    return write_trace(target, reader.head, rows(), reader.has_weights, reader.has_hidden)


def merge_traces(sources: Sequence[Path], target: Path) -> int:
    """Write traces one after the other; returns tokens in all.

    Passes, requests and times go on where those before ended. Weights and hidden states are kept where all have some.

    Raises:
        SideFileError: a trace is damaged, or of other layers and experts than the first.
    """
    readers = [TraceReader.open(source) for source in sources]
    head = readers[0].head
    for reader in readers[1:]:
        if reader.head.shape != head.shape or head.fingerprint != reader.head.fingerprint:
            raise SideFileError(f"{reader.path} is of another model than {readers[0].path}, so they make no one trace")
    weights, hidden = (all(each) for each in zip(*((one.has_weights, one.has_hidden) for one in readers), strict=True))
    names = ", ".join(path.name for path in sources)

    def rows() -> Iterator[TraceRows]:
        window = request = 0
        time = 0.0
        for reader in readers:
            last_window, last_request, end = window, request, time
            for each in reader.batches(weights, hidden):
                moved = each._replace(
                    window=each.window + np.int32(window),
                    request=np.where(each.request >= 0, each.request + np.int32(request), each.request),
                    started=each.started + time,
                )
                last_window = int(moved.window.max()) + 1
                last_request = max(last_request, int(moved.request.max()) + 1)
                end = max(end, float((moved.started + moved.seconds).max()))
                yield moved
            window, request, time = last_window, last_request, end

    return write_trace(target, head.model_copy(update={"note": f"{names} in a row"}), rows(), weights, hidden)


def write_trace(target: Path, head: TraceHead, rows: Iterator[TraceRows], weights: bool, hidden: bool = False) -> int:
    """Write rows as a trace, whole or not at all; returns its tokens. Raises OptionError where there are none."""
    writer = TraceWriter(target, head, weights, hidden)
    try:
        for each in rows:
            writer.add(each)
        if not writer.taken:
            raise OptionError(f"nothing is left to write into {target}")
    except BaseException:
        writer.abandon()
        raise
    writer.close()
    return writer.tokens
