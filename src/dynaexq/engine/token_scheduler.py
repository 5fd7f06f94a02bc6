"""Regrouping for the engine: sequences by their slots, what routers chose for them, and what deciding takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from dynaexq.core import ModelShape
from dynaexq.engine.requests import Request
from dynaexq.engine.sequence import Sequence as Running
from dynaexq.engine.slots import Reuse, SlotTable
from dynaexq.policy.caching import Places
from dynaexq.policy.paths import Paths
from dynaexq.policy.regrouping import FEW, Regrouper, RegroupingOptions
from dynaexq.traffic.recorder import ClosedWindow, RoutedLayer, TokenRun

ALIKE = 16
"""Tokens that a prompt has in common with a sequence, at least, to expect that it takes the same path."""


class TokenScheduler:
    """Decides for one engine, on its thread; `describe` may be called from any."""

    def __init__(
        self,
        options: RegroupingOptions,
        shape: ModelShape,
        slots: int,
        capacity: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """For a cache of `capacity` experts."""
        self.options = options
        self._regrouper = Regrouper(options, Paths(slots, shape.layers, shape.experts), capacity)
        self._layers, self._clock = shape.layers, clock
        self._slots: dict[int, int] = {}

    def begin(self, request: Request, reuse: Reuse) -> None:
        """A request was given a slot."""
        self._slots[request.number] = reuse.slot.number
        self._regrouper.begin(reuse.slot.number, reuse.source.number, reuse.length)
        self._regrouper.forget(request.number)

    def end(self, request: Request) -> None:
        """A request has ended, whether it ever had a slot or not."""
        if (slot := self._slots.pop(request.number, None)) is not None:
            self._regrouper.end(slot)
        self._regrouper.forget(request.number)

    def choose(self, ready: list[Running]) -> list[Running]:
        """Who of the decoding sequences takes part in the next step."""
        with self._timed() as now:
            chosen = set(self._regrouper.choose([each.slot.number for each in ready], now))
            return [each for each in ready if each.slot.number in chosen]

    def admit(self, waiting: Sequence[Request], table: SlotTable, running: Sequence[Running]) -> Request:
        """Who of the first waiting requests gets a slot."""
        if len(waiting) == 1:
            return waiting[0]
        with self._timed():
            known = self._regrouper.paths.known
            holders = [slot for slot in table.slots if known[slot.number]]
            likenesses = [table.resembling(request.prompt, holders, ALIKE) for request in waiting]
            taken = [each.slot.number for each in running]
            return waiting[self._regrouper.admit([each.number for each in waiting], likenesses, taken)]

    def after_window(self, window: ClosedWindow) -> None:
        """Learn from a step that has ended."""
        runs = [run for run in window.runs if run.request in self._slots]
        if not runs or len(runs) < len(window.runs) or not (len(runs) > FEW or runs[-1].prefill):
            return
        with self._timed():
            ids = join_passes(window.layers, self._layers)
            if ids is not None and ids.shape[1] == sum(run.tokens for run in runs):
                self._note(runs, ids)

    def describe(self) -> dict[str, Any]:
        """The granularity, and what came of it."""
        return {"granularity": self.options.granularity, **asdict(self._regrouper.counts)}

    def _note(self, runs: list[TokenRun], ids: Places) -> None:
        paths = self._regrouper.paths
        slots = [self._slots[run.request] for run in runs]
        decoding = [slot for slot, run in zip(slots, runs, strict=True) if not run.prefill]  # they come first
        if decoding:
            paths.note_tokens(decoding, ids[:, : len(decoding)])
        start = len(decoding)
        for slot, run in zip(slots[start:], runs[start:], strict=True):
            paths.note_prompt(slot, ids[:, start : start + run.tokens])
            start += run.tokens

    @contextmanager
    def _timed(self) -> Iterator[float]:
        start = self._clock()
        try:
            yield start
        finally:
            self._regrouper.counts.seconds += self._clock() - start


def join_passes(routed: list[RoutedLayer], layers: int) -> Places | None:
    """What all tokens of a step chose, [layers, tokens, top_k], where it ran as several forward passes one after the
    other; None of a step that failed half-way."""
    if not routed or len(routed) % layers:
        return None
    passes = [routed[start : start + layers] for start in range(0, len(routed), layers)]
    found: Places = np.concatenate([np.stack([each.ids.numpy() for each in one]) for one in passes], axis=1)
    return found
