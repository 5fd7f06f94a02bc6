"""One loaded model's experts: residency and kernel tied together, one window per forward pass."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
import torch

from dynaexq.control import ControlLoop
from dynaexq.core import ModelShape, Window
from dynaexq.kernels import ExpertsCall, ExpertsKernel, LayerFunctions
from dynaexq.residency import BudgetTracker, HandleWords
from dynaexq.residency.handles import Words
from dynaexq.residency.transitions import Counters
from dynaexq.residency.versions import HIGH
from dynaexq.traffic import RoutedLayer


class Experts(Protocol):
    """What the runtime needs of resident experts, static or versioned."""

    shape: ModelShape
    handles: HandleWords

    @property
    def expert_bytes(self) -> int:
        """Bytes of the arena."""

    @property
    def bits_per_weight(self) -> float:
        """Resident bits per expert weight."""

    def check_integrity(self) -> None:
        """Assert the invariants; only while nothing else changes state."""


class ExpertRuntime:
    """Serves the experts of one model. Forward passes of several threads may overlap.

    `control` moves versions while the model runs; None where every expert stays as it is.
    """

    def __init__(
        self, mode: str, experts: Experts, kernel: ExpertsKernel, budget: BudgetTracker, control: ControlLoop | None
    ) -> None:
        self.mode = mode
        self.experts = experts
        self.kernel = kernel
        self.budget = budget
        self.control = control
        self._local = _Windows()

    @property
    def counters(self) -> Counters:
        """What happened to versions so far: nothing, where none moves."""
        return self.control.pipeline.counters if self.control else Counters()

    @property
    def hot_share_high(self) -> float:
        """Share of routed traffic that ran at the high tier."""
        if self.control:
            return self.control.hot_share_high
        return 1.0 if self.mode == "full" else 0.0

    def close(self) -> None:
        """Stop moving versions; the model stays usable."""
        if self.control:
            self.control.close()

    def begin_window(self, prefill: bool) -> None:
        """Pin the handles for one forward pass of this thread (dynaexq paper, section 1: window-level pinning).

        Nested calls (a model inside a model) share the outermost window.
        """
        local = self._local
        if local.depth == 0:
            if self.control:
                self.control.before_window()
            local.window, local.words = self.experts.handles.pin()
            local.prefill, local.routed = prefill, []
        local.depth += 1

    def end_window(self) -> None:
        """Close what `begin_window` opened; the outermost call releases the pin."""
        local = self._local
        if local.depth == 0:
            return  # the window never opened: its error is on its way
        local.depth -= 1
        if local.depth == 0:
            assert local.window is not None and local.words is not None
            if self.control:
                high: np.ndarray[Any, np.dtype[np.bool_]] = local.words >> np.uint64(56) == HIGH
            self.experts.handles.release(local.window)
            local.window = local.words = None
            if self.control:
                self.control.after_window(local.routed, local.prefill, high)

    def forward(
        self, layer: int, functions: LayerFunctions, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Experts of MoE layer `layer`: hidden [tokens, hidden], ids and weights [tokens, top_k]."""
        local = self._local
        assert local.words is not None, "the experts were called outside of the model's forward"
        if self.control:
            local.routed.append(RoutedLayer(layer, ids, weights))
        count = self.experts.shape.experts
        words = local.words[layer * count : (layer + 1) * count]
        return self.kernel.forward(ExpertsCall(hidden, ids, weights, words, functions))


class _Windows(threading.local):
    """The open window of each thread."""

    def __init__(self) -> None:
        self.routed: list[RoutedLayer] = []

    depth = 0
    prefill = False
    window: Window | None = None
    words: Words | None = None
