"""One loaded model's experts: residency and kernel tied together, one window per forward pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from dynaexq.control import ControlLoop
from dynaexq.core import ModelShape, Window
from dynaexq.formats import ExpertFormat, VersionLayout
from dynaexq.kernels import ExpertsCall, ExpertsKernel, LayerFunctions
from dynaexq.kernels.groups import forward_in_groups
from dynaexq.kernels.threads import thread_count
from dynaexq.residency import BudgetTracker, HandleWords
from dynaexq.residency.cache import CachedExperts
from dynaexq.residency.handles import Words
from dynaexq.residency.transitions import Counters
from dynaexq.shadow import Probe
from dynaexq.traffic import RoutedLayer
from dynaexq.traffic.recorder import ClosedWindow, Levels, TokenRun
from dynaexq.traffic.shares import TierShares


class Experts(Protocol):
    """What the runtime needs of resident experts, static or versioned."""

    shape: ModelShape
    handles: HandleWords
    formats: list[ExpertFormat]
    layouts: list[VersionLayout]

    @property
    def expert_bytes(self) -> int:
        """Bytes of the arena."""

    @property
    def bits_per_weight(self) -> float:
        """Resident bits per expert weight."""

    @property
    def padding_bytes(self) -> int:
        """Internal fragmentation of the arena."""

    def check_integrity(self) -> None:
        """Assert the invariants; only while nothing else changes state."""


class WindowListener(Protocol):
    """Sees every forward pass: the control loop, or a meter."""

    def before_window(self) -> None:
        """A window is about to open."""

    def after_window(self, window: ClosedWindow) -> None:
        """A window has closed."""

    @property
    def shares(self) -> TierShares:
        """At which tiers routed traffic ran."""

    def close(self) -> None:
        """Come to rest."""


class Trace(Protocol):
    """Writes windows down (traffic.trace_recorder)."""

    problem: str | None
    hidden: bool
    """Whether it wants to know what routers are given."""

    def after_window(self, window: ClosedWindow) -> None:
        """A window has closed."""

    def close(self) -> None:
        """Finish what is written."""


class WindowWatcher(Protocol):
    """Wants to know what routers choose: the engine's token scheduler."""

    def after_window(self, window: ClosedWindow) -> None:
        """A window has closed."""


class ExpertRuntime:
    """Serves the experts of one model. Forward passes of several threads may overlap.

    `listener` sees traffic: a ControlLoop moves versions by it, a TrafficMeter counts it, None leaves it alone.
    """

    def __init__(
        self, mode: str, experts: Experts, kernel: ExpertsKernel, budget: BudgetTracker, listener: WindowListener | None
    ) -> None:
        self.mode = mode
        self.experts = experts
        self.kernel = kernel
        self.budget = budget
        self.listener = listener
        self.cache = experts if isinstance(experts, CachedExperts) else None
        self.fused_layers = 0
        self.shadow = listener.signals.shadow if isinstance(listener, ControlLoop) else None
        self.tap: Callable[[int, ExpertsCall], None] | None = None
        """Sees what every layer gives its experts, before they run; not in decode steps that are one native call."""
        self.trace: Trace | None = None
        """Sees every window after the listener; set by whoever records the run."""
        self.watcher: WindowWatcher | None = None
        """Sees every window too; set by whoever schedules by it."""
        self._local = _Windows()

    @property
    def control(self) -> ControlLoop | None:
        """The loop that moves versions, where they move."""
        return self.listener if isinstance(self.listener, ControlLoop) else None

    @property
    def counters(self) -> Counters:
        """What happened to versions so far: nothing, where none moves."""
        if self.cache:
            return self.cache.counters
        return self.control.pipeline.counters if self.control else Counters()

    @property
    def hot_share_high(self) -> float:
        """Share of routed traffic that ran above the lowest tier."""
        if self.listener:
            return self.listener.shares.raised
        return 1.0 if self.mode == "full" else 0.0

    @property
    def shares(self) -> TierShares | None:
        """At which tiers routed traffic ran; None where nobody counts."""
        return self.listener.shares if self.listener else None

    def problems(self) -> list[str]:
        """What is wrong though serving goes on, for people."""
        own = [self.trace.problem] if self.trace and self.trace.problem else []
        return own + (self.control.problems() if self.control else [])

    def describe_kernel(self) -> dict[str, str | int | None]:
        """The kernel in use: its name, how it rounds activations, its instruction set and threads, why not all layers
        go through it (None: they do), and how many decoder layers decode in one native call."""
        kernel = self.kernel
        return {
            "kernel": kernel.name,
            "activations": kernel.activations,
            "instructions": kernel.instructions,
            "threads": thread_count(),
            "kernel_fallback": kernel.fallback,
            "fused_layers": self.fused_layers,
        }

    def describe_cache(self) -> dict[str, float] | None:
        """How many experts a cache holds, and which share of needs it met; None where all experts are resident."""
        return self.cache.describe() if self.cache else None

    def close(self) -> None:
        """Stop moving versions; a model whose experts are all resident stays usable."""
        if self.listener:
            self.listener.close()
        if self.trace:
            self.trace.close()
        if self.cache:
            with self.cache.turn:
                self.cache.close()

    def begin_window(self, prefill: bool, runs: Sequence[TokenRun] = ()) -> None:
        """Pin the handles for one forward pass of this thread (dynaexq paper, section 1: window-level pinning).

        Nested calls (a model inside a model) share the outermost window. `runs` says whose tokens it is of.
        """
        local = self._local
        if local.depth == 0:
            if self.listener:
                self.listener.before_window()
            if self.cache:
                self.cache.turn.acquire()
                local.words = self.cache.blank_words()
            else:
                local.window, local.words = self.experts.handles.pin()
            local.probe = self.shadow.shown if self.shadow else None  # after the pin, see Shadow._withdraw
            local.prefill, local.runs, local.routed, local.opened = prefill, runs, [], time.perf_counter()
        local.depth += 1

    def end_window(self) -> None:
        """Close what `begin_window` opened; the outermost call releases the pin."""
        local = self._local
        if local.depth == 0:
            return  # the window never opened: its error is on its way
        local.depth -= 1
        if local.depth == 0:
            assert local.words is not None
            listeners = [each for each in (self.listener, self.trace, self.watcher) if each]
            if listeners:
                formats = (local.words >> np.uint64(56)).astype(np.int64)
                levels: Levels = self.cache.levels() if self.cache else formats
            if self.cache:
                self.cache.rest()
                self.cache.turn.release()
            elif local.window is not None:
                self.experts.handles.release(local.window)
            local.window = local.words = None
            if listeners:
                seconds = time.perf_counter() - local.opened
                window = ClosedWindow(
                    local.routed, local.prefill, levels, seconds, opened=local.opened, runs=local.runs
                )
                for listener in listeners:
                    listener.after_window(window)

    @contextmanager
    def window(self, prefill: bool, runs: Sequence[TokenRun] = ()) -> Iterator[None]:
        """All forward passes of this thread within run on the same versions; see begin_window."""
        self.begin_window(prefill, runs)
        try:
            yield
        finally:
            self.end_window()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """A window that is no traffic."""
        before = self.listener, self.trace, self.watcher
        self.listener = self.trace = self.watcher = None
        try:
            with self.window(prefill=False), self.cache.forgotten() if self.cache else nullcontext():
                yield
        finally:
            self.listener, self.trace, self.watcher = before

    def forward(
        self, layer: int, functions: LayerFunctions, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Experts of MoE layer `layer`: hidden [tokens, hidden], ids and weights [tokens, top_k]."""
        call = ExpertsCall(hidden, ids, weights, self.words(layer), functions)
        self.record(layer, ids, weights, hidden)
        if self.tap is not None:
            self.tap(layer, call)
        if self.cache:
            return self._forward_cached(self.cache, layer, call)
        result = self.kernel.forward(call)
        if self.shadow and (probe := self._local.probe) is not None and probe.key.layer == layer:
            self.shadow.look(probe, call, self.kernel)
        return result

    def _forward_cached(self, cache: CachedExperts, layer: int, call: ExpertsCall) -> torch.Tensor:
        hidden = call.hidden.float().numpy() if self.sees_hidden else None
        groups = cache.look(layer, call.ids.numpy(), hidden)
        if len(groups) > 1:
            return forward_in_groups(self.kernel, call, groups, lambda group: cache.bring(layer, group, call.words))
        if not cache.overlaps:
            cache.bring(layer, groups[0], call.words)
            return self.kernel.forward(call)
        cache.request(layer, groups[0], call.words)
        return self.kernel.forward(replace(call, arrive=lambda: cache.arrive(layer, groups[0], call.words)))

    def reaches(self, choices: int) -> bool:
        """Whether all experts of a layer that `choices` routed choices name are reachable at once."""
        return self.cache is None or min(choices, self.experts.shape.experts) <= self.cache.map.capacity

    def bring(self, layer: int, ids: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """Make the experts that a router chose, ids [tokens, top_k], reachable through this window's words; all are,
        where none is cached. They must fit at once, see `reaches`. `hidden` [tokens, hidden] is what it was given.

        Where experts are read ahead, some may be reachable only after `arrive`, which kernels call for themselves.
        """
        if self.cache:
            (group,) = self.cache.look(layer, ids.numpy(), None if hidden is None else hidden.numpy())
            request = self.cache.request if self.cache.overlaps else self.cache.bring
            request(layer, group, self.words(layer))

    def arrive(self, layer: int, ids: torch.Tensor) -> None:
        """Wait for what `bring` was asked for."""
        assert self.cache
        self.cache.arrive(layer, np.unique(ids.numpy()), self.words(layer))

    @property
    def sees_hidden(self) -> bool:
        """Whether somebody wants to know what routers are given."""
        foresight = self.cache.foresight if self.cache else None
        watched = foresight is not None and foresight.predictor.watches
        return watched or (self.trace is not None and self.trace.hidden)

    @property
    def listens(self) -> bool:
        """Whether anybody wants to know what routers choose."""
        return self.listener is not None or self.trace is not None or self.watcher is not None

    @property
    def in_window(self) -> bool:
        """Whether this thread has a window open."""
        return self._local.words is not None

    def words(self, layer: int) -> Words:
        """Handles [experts] of MoE layer `layer` in this thread's window."""
        words, count = self._local.words, self.experts.shape.experts
        assert words is not None, "the experts were called outside of the model's forward"
        return words[layer * count : (layer + 1) * count]

    def record(self, layer: int, ids: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """Note what the router of MoE layer `layer` chose, ids and weights [tokens, top_k], given hidden."""
        if self.listens:
            kept = hidden.to(torch.float16) if hidden is not None and self.trace and self.trace.hidden else None
            self._local.routed.append(RoutedLayer(layer, ids, weights, kept))


class _Windows(threading.local):
    """The open window of each thread."""

    def __init__(self) -> None:
        self.routed: list[RoutedLayer] = []

    depth = 0
    opened = 0.0
    prefill = False
    runs: Sequence[TokenRun] = ()
    window: Window | None = None
    probe: Probe | None = None
    words: Words | None = None
