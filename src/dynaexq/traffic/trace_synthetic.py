"""Traces that nobody recorded: skewed, shifting, bursting and correlated traffic of any geometry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dynaexq.core import OptionError
from dynaexq.traffic.trace import Column, TraceHead, TraceRows

DRAWN = 1 << 24
"""Numbers that are drawn together, about: one for every expert of a token."""


@dataclass(frozen=True)
class SyntheticTraffic:
    """What traffic is like.

    Args:
        tokens: in all.
        zipf: exponent of the popularity of a layer's experts by rank; 0 is even.
        shift_every: tokens after which the workload shifts and popularity is dealt anew; None: never.
        burst: how likely a token belongs to a burst, in which its request's experts are those of another popularity.
        repeat: how likely a token takes the experts of the one before it in its request.
        batch: requests that decode together.
        prompt: tokens of each request's prompt, one pass; 0: none.
        answer: tokens that each request decodes before another takes its place.
        seed: of all draws.
    """

    tokens: int
    zipf: float = 1.0
    shift_every: int | None = None
    burst: float = 0.0
    repeat: float = 0.0
    batch: int = 1
    prompt: int = 0
    answer: int = 256
    seed: int = 0

    def check(self) -> None:
        """Raise OptionError for values out of range."""
        if min(self.tokens, self.batch, self.answer, self.shift_every or 1) < 1 or self.prompt < 0 or self.seed < 0:
            raise OptionError("tokens, batch, answer and shift-every must be at least 1, prompt and seed at least 0")
        if not 0 <= self.zipf <= 10:
            raise OptionError(f"--zipf {self.zipf} is not in 0..10")
        for name, value in (("burst", self.burst), ("repeat", self.repeat)):
            if not 0 <= value <= 1:
                raise OptionError(f"--{name} {value} is not in 0..1")


def draw_trace(head: TraceHead, traffic: SyntheticTraffic) -> Iterator[TraceRows]:
    """Rows of a trace without times and weights. The same for the same arguments."""
    traffic.check()
    random = np.random.default_rng(traffic.seed)
    popular, bursting = _deal(head, traffic, random), _deal(head, traffic, random)
    last = np.zeros((traffic.batch, head.layers, head.top_k), np.uint16)
    made = window = shifts = 0
    left = np.zeros(traffic.batch, np.int64)  # of each slot's answer
    requests = np.arange(traffic.batch)
    while made < traffic.tokens:
        if traffic.shift_every is not None and made // traffic.shift_every > shifts:
            shifts = made // traffic.shift_every
            popular, bursting = _deal(head, traffic, random), _deal(head, traffic, random)
        ended = np.flatnonzero(left == 0)
        if ended.size and traffic.prompt:
            slot, request = int(ended[0]), int(requests[ended[0]])
            count = min(traffic.prompt, traffic.tokens - made)
            ids = _repeat_within(_draw(head, popular, count, random), traffic.repeat, random)
            yield _rows(window, ids, np.full(count, request), prefill=True)
            last[slot] = ids[-1]
            left[slot] = traffic.answer
        else:
            left[ended] = traffic.answer
            count = min(traffic.batch, traffic.tokens - made)
            ids = _draw(head, popular, count, random)
            burst = random.random(count) < traffic.burst
            ids[burst] = _draw(head, bursting, int(burst.sum()), random)
            same = random.random(count) < traffic.repeat
            ids[same] = last[:count][same]
            last[:count] = ids
            yield _rows(window, ids, requests[:count], prefill=False)
            left -= 1
            requests[left == 0] = requests.max() + 1 + np.arange(int((left == 0).sum()))
        made += count
        window += 1


def _deal(head: TraceHead, traffic: SyntheticTraffic, random: np.random.Generator) -> Column:
    """Log-popularity of every expert, [layers, experts]: ranks in a random order."""
    ranks = -traffic.zipf * np.log(np.arange(1, head.experts + 1))
    return random.permuted(np.tile(ranks, (head.layers, 1)), axis=1).astype(np.float32)


def _draw(head: TraceHead, popular: Column, count: int, random: np.random.Generator) -> Column:
    """Ids [count, layers, top_k] without repetition in a layer: the top of popularity with Gumbel noise."""
    parts = [np.zeros((0, head.layers, head.top_k), np.uint16)]
    piece = max(1, DRAWN // (head.layers * head.experts))
    for start in range(0, count, piece):
        shape = (min(piece, count - start), head.layers, head.experts)
        noise = -np.log(random.exponential(size=shape).astype(np.float32))
        top = np.argpartition(noise + popular, head.experts - head.top_k, axis=2)[:, :, head.experts - head.top_k :]
        parts.append(top.astype(np.uint16))
    return np.concatenate(parts)


def _repeat_within(ids: Column, repeat: float, random: np.random.Generator) -> Column:
    """Some tokens take what the one before them has."""
    fresh = random.random(len(ids)) >= repeat
    fresh[:1] = True
    return ids[np.maximum.accumulate(np.where(fresh, np.arange(len(ids)), 0))]


def _rows(window: int, ids: Column, requests: Column, prefill: bool) -> TraceRows:
    count = len(ids)
    return TraceRows(
        window=np.full(count, window, np.int32),
        started=np.zeros(count),
        seconds=np.zeros(count, np.float32),
        prefill=np.full(count, prefill),
        request=requests.astype(np.int32),
        expert_bytes=np.zeros(count, np.int64),
        ids=ids,
        weights=None,
    )
