"""Who runs next: pure decisions on counts, no clock, no model.

A step takes one token of every running sequence, and spends what is left of its token budget on chunks of prompts: a
long prompt cannot hold up the others by more than the budget. Chunks are cut at multiples of `chunk` wherever that is
possible, so that a prompt is cut the same way alone and among others.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dynaexq.engine.requests import Request


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of a prompt."""

    start: int
    end: int


class WaitingQueue:
    """Requests by priority, then by arrival. Taking one out anywhere is cheap."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # with entries of requests that were taken out
        self._waiting: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Add a request."""
        heapq.heappush(self._heap, (-request.priority, request.number))
        self._waiting[request.number] = request

    def first(self, count: int) -> list[Request]:
        """The first `count` of the highest priority, or all there are of it."""
        highest = max(request.priority for request in self._waiting.values())
        alike = (request for request in self._waiting.values() if request.priority == highest)
        return heapq.nsmallest(count, alike, key=lambda request: request.number)

    def pop(self) -> Request:
        """Take the first of at least one."""
        while True:
            _, number = heapq.heappop(self._heap)
            if request := self._waiting.pop(number, None):
                return request

    def remove(self, number: int) -> Request | None:
        """Take request `number` out; None if it does not wait."""
        return self._waiting.pop(number, None)


def next_chunk(done: int, prompt: int, chunk: int | None) -> Chunk:
    """The next piece of a prompt of which `done` tokens are there: up to the next multiple of `chunk`, or all."""
    return Chunk(done, prompt if chunk is None else min((done // chunk + 1) * chunk, prompt))


def plan_chunks(
    prompts: Sequence[tuple[int, int]], decoding: int, step_tokens: int, chunk: int | None
) -> list[tuple[int, Chunk]]:
    """Chunks of a step beside `decoding` running sequences: (index into `prompts`, chunk), in order.

    `prompts` are (done, length), the first first. The first chunk is always taken, or prompts would starve; others
    while they fit `step_tokens` in all.
    """
    chosen: list[tuple[int, Chunk]] = []
    room = step_tokens - decoding
    for index, (start, length) in enumerate(prompts):
        done = start
        while done < length:
            piece = next_chunk(done, length, chunk)
            if chosen and piece.end - piece.start > room:
                return chosen
            chosen.append((index, piece))
            room -= piece.end - piece.start
            done = piece.end
    return chosen
