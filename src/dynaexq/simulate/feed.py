"""Forward passes of a trace in blocks: which experts each of them asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dynaexq.policy.hotness import Scores
from dynaexq.policy.prediction import Matrix
from dynaexq.simulate.costs import Timed
from dynaexq.traffic.trace import TraceReader, TraceRows, join_rows

Integers = np.ndarray[Any, np.dtype[np.int64]]


class Asked(NamedTuple):
    """What the tokens of one pass ask for: selections of every expert [layers * experts], how many tokens they are, and
    what routers were given, [tokens, layers, hidden], where it is known and wanted."""

    counts: Integers
    tokens: int
    hidden: Matrix | None = None


class Block(NamedTuple):
    """Some passes in a row, and their tokens.

    `places` [tokens, layers * top_k] numbers experts through all layers, `ends` [passes] is where the tokens of each
    pass end, `tokens` [passes] how many they are; `mass` is None where selections count alike, `hidden` where nobody
    looks at it.
    """

    ends: Integers
    tokens: Integers
    prefill: np.ndarray[Any, np.dtype[np.bool_]]
    started: Scores
    seconds: Scores
    nbytes: Scores
    places: Integers
    mass: np.ndarray[Any, np.dtype[np.float32]] | None
    request: np.ndarray[Any, np.dtype[np.int32]]
    prompt: np.ndarray[Any, np.dtype[np.bool_]]
    hidden: Matrix | None = None

    def rows(self, place: int) -> slice:
        """Where the tokens of a pass are."""
        return slice(int(self.ends[place - 1]) if place else 0, int(self.ends[place]))

    def selections(self, rows: slice, size: int) -> Integers:
        """Selections of every one of `size` experts [layers * experts] by some tokens."""
        return np.bincount(self.places[rows].ravel(), minlength=size)

    def asked(self, place: int, size: int) -> Asked:
        """What a pass asks of `size` experts."""
        rows = self.rows(place)
        hidden = None if self.hidden is None else self.hidden[rows]
        return Asked(self.selections(rows, size), rows.stop - rows.start, hidden)

    def timed(self) -> Timed:
        """What the recorded passes took."""
        return Timed(self.prefill, self.tokens.astype(np.float64), self.nbytes, self.seconds)


def read_blocks(reader: TraceReader, weights: bool = False, hidden: bool = False) -> Iterator[Block]:
    """All passes of a trace, whole ones in every block. Raises SideFileError."""
    held: TraceRows | None = None
    for rows in reader.batches(weights, hidden):
        joined = rows if held is None else join_rows([held, rows])
        starts = np.flatnonzero(np.diff(joined.window, prepend=joined.window[:1] - 1))
        if (last := int(starts[-1])) > 0:
            yield _make_block(joined.cut(slice(None, last)), reader.head.experts)
        held = joined.cut(slice(last, None))
    if held is not None:
        yield _make_block(held, reader.head.experts)


def _make_block(rows: TraceRows, experts: int) -> Block:
    starts = np.flatnonzero(np.diff(rows.window, prepend=rows.window[:1] - 1))
    ends = np.append(starts[1:], len(rows.window)).astype(np.int64)
    layers = rows.ids.shape[1]
    tokens = np.diff(ends, prepend=0)
    places = np.add(rows.ids, (experts * np.arange(layers))[:, None], dtype=np.int64)
    prompts = np.add.reduceat(rows.prefill.astype(np.int64), starts)
    return Block(
        ends,
        tokens,
        2 * prompts > tokens,
        rows.started[starts],
        rows.seconds[starts].astype(np.float64),
        rows.expert_bytes[starts].astype(np.float64),
        places.reshape(len(places), -1),
        None if rows.weights is None else rows.weights.reshape(len(places), -1),
        rows.request,
        rows.prefill,
        rows.hidden,
    )
