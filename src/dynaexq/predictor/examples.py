"""What predictors learn from, and are judged by: traces with hidden states, apart by requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dynaexq.core import OptionError
from dynaexq.traffic.trace import TraceHead, TraceReader, TraceRows, join_rows

HELD_OUT = 5
"""One request of so many is held out: predictors are judged by it, and do not learn from it."""

MAX_BYTES = 2 << 30
"""Of hidden states, at most."""

FEWEST = 256
"""Tokens, below which nothing can be said of what is held out."""

Column = np.ndarray[Any, np.dtype[Any]]


class Examples(NamedTuple):
    """Tokens of requests, those of a request in a row and in their order.

    Args:
        head: what the first trace is of; all are of one shape and model.
        ids: [tokens, layers, top_k].
        hidden: float16 [tokens, layers, hidden], what routers were given, or None where a trace has none.
        following: the next token of the same request, -1 where there is none, [tokens].
        held: whether it is held out, [tokens].
    """

    head: TraceHead
    ids: Column
    hidden: Column | None
    following: Column
    held: Column

    def targets(self, layer: int, distance: int) -> tuple[Column, Column]:
        """Who is needed `distance` layers after `layer`, in the same pass or the next: tokens that have that, and what
        they choose, [some], [some, top_k]."""
        later, target = divmod(layer + distance, self.head.layers)
        tokens = np.arange(len(self.ids))
        for _ in range(later):
            tokens = np.where(tokens >= 0, self.following[tokens], -1)
        have = np.flatnonzero(tokens >= 0)
        return have, self.ids[tokens[have], target]


def gather_examples(readers: Sequence[TraceReader], max_tokens: int) -> Examples:
    """At most so many tokens of traces, of each the first of its share.

    Raises:
        OptionError: too few tokens, or more than memory should be taken for.
        SideFileError: a trace is damaged.
    """
    head = readers[0].head
    for reader in readers[1:]:
        if reader.head.shape != head.shape or len({each.head.fingerprint for each in (reader, readers[0])} - {""}) > 1:
            raise OptionError(f"{reader.path} and {readers[0].path} are traces of different models")
    hidden = all(reader.has_hidden for reader in readers)
    share = max(1, max_tokens // len(readers))
    width = 2 * head.layers * head.hidden if hidden else 0
    if (nbytes := width * min(max_tokens, sum(reader.tokens for reader in readers))) > MAX_BYTES:
        fitting = MAX_BYTES // width
        raise OptionError(
            f"hidden states of so many tokens are {nbytes >> 20} MiB; give --max-tokens {fitting} or less"
        )
    parts, first = [], 0
    for reader in readers:
        rows = _read_rows(reader, share, hidden)
        known = first + np.maximum(rows.request, -1).astype(np.int64) + 1
        first = int(known.max()) + 1
        parts.append(rows._replace(request=known, weights=None, hidden=rows.hidden if hidden else None))
    whole = join_rows(parts)
    if len(whole.ids) < FEWEST:
        raise OptionError(
            f"{len(whole.ids)} tokens are too few to learn from; {FEWEST} are the least, 10000 are better"
        )
    order = np.argsort(whole.request, kind="stable")
    whole = whole.cut(order)
    return Examples(head, whole.ids, whole.hidden, _follow(whole.request), _hold_out(whole.request))


def _read_rows(reader: TraceReader, count: int, hidden: bool) -> TraceRows:
    parts, tokens = [], 0
    for rows in reader.batches(hidden=hidden):
        parts.append(rows.cut(slice(0, count - tokens)))
        tokens += len(parts[-1].ids)
        if tokens == count:
            break
    if not parts:
        raise OptionError(f"{reader.path} has no tokens")
    return join_rows(parts)


def _follow(requests: Column) -> Column:
    """The next token of every token; those of unknown requests are taken for one request."""
    following = np.arange(1, len(requests) + 1)
    following[np.append(requests[1:] != requests[:-1], True)] = -1
    return following


def _hold_out(requests: Column) -> Column:
    """One request of HELD_OUT, spread evenly; of fewer requests, the last part of the tokens."""
    names, places = np.unique(requests, return_inverse=True)
    if len(names) >= HELD_OUT:
        held: Column = places % HELD_OUT == HELD_OUT - 1
        return held
    tokens = len(requests)
    return np.arange(tokens) >= tokens - tokens // HELD_OUT
