"""What a trace says in figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dynaexq.core import OptionError
from dynaexq.doctor.figures import Figures, Subject
from dynaexq.traffic.trace import Column, TraceHead, TraceReader, TraceRows
from dynaexq.traffic.trace_statistics import Scores, TraceStatistics, measure_trace, overlap

HOT = 0.25
"""Of a layer's experts: its hottest, compared between halves of a trace."""

PASS_TOKENS = 8
"""Decoded together, or fewer where there are not that many: as many as a handful of users bring."""


def subject_of(head: TraceHead) -> Subject:
    """What a trace is of."""
    return Subject(kind="trace", model=head.model, layers=head.layers, experts=head.experts)


def measure_figures(reader: TraceReader, step: Callable[[int, int], None] = lambda *_: None) -> Figures:
    """Of a trace; `step` hears how many of all its tokens were read.

    Raises:
        OptionError: it holds no tokens.
        SideFileError: it is damaged.
    """
    if not reader.tokens:
        raise OptionError(f"{reader.path} holds no tokens")
    head = reader.head
    halves = np.zeros((2, head.layers, head.experts))

    def watch() -> Iterator[TraceRows]:
        seen, middle = 0, reader.tokens // 2
        for rows in reader.batches():
            border = min(max(middle - seen, 0), len(rows.ids))
            for half, part in zip(halves, (rows.ids[:border], rows.ids[border:]), strict=True):
                _add(half, part)
            seen += len(rows.ids)
            step(seen, reader.tokens)
            yield rows

    return describe_trace(head, measure_trace(head, watch(), reader.tokens), halves)


def describe_trace(head: TraceHead, found: TraceStatistics, halves: Scores) -> Figures:
    """Figures; `halves` [2, layers, experts] is the traffic of both."""
    sizes = [size for size in found.decode if size <= PASS_TOKENS]
    return Figures(
        subject=subject_of(head),
        tokens=found.tokens,
        selections=float(halves.sum((1, 2)).min()) / (head.layers * head.experts),
        entropy=found.entropy,
        repeats=found.repeats[1],
        chance=found.chance,
        stability=overlap(halves[0], halves[1], HOT),
        spread=found.decode[max(sizes)] if sizes else None,
        spread_tokens=max(sizes) if sizes else None,
    )


def _add(half: Scores, ids: Column) -> None:
    """Count ids [tokens, layers, top_k]."""
    layers, experts = half.shape
    places = ids.astype(np.int64) + experts * np.arange(layers)[:, None]
    half += np.bincount(places.ravel(), minlength=half.size).reshape(half.shape)
