"""One loaded model's experts: residency and kernel tied together, one window per forward pass."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from dynaexq.core import Window
from dynaexq.kernels import ExpertsCall, ExpertsKernel, LayerFunctions
from dynaexq.residency import BudgetTracker, ResidentExperts
from dynaexq.residency.handles import Words


@dataclass
class Counters:
    """What happened to expert versions since start. In `full` and `static` mode nothing ever moves."""

    waits: int = 0
    wait_seconds: float = 0.0
    promotions: int = 0
    demotions: int = 0
    evictions: int = 0
    deferred: int = 0
    failed: int = 0
    bytes_moved: int = 0


class ExpertRuntime:
    """Serves the experts of one model. Forward passes of several threads may overlap."""

    def __init__(self, mode: str, experts: ResidentExperts, kernel: ExpertsKernel, budget: BudgetTracker) -> None:
        self.mode = mode
        self.experts = experts
        self.kernel = kernel
        self.budget = budget
        self.counters = Counters()
        self._local = _Windows()

    def begin_window(self) -> None:
        """Pin the handles for one forward pass of this thread (dynaexq paper, section 1: window-level pinning).

        Nested calls (a model inside a model) share the outermost window.
        """
        if self._local.depth == 0:
            self._local.window, self._local.words = self.experts.handles.pin()
        self._local.depth += 1

    def end_window(self) -> None:
        """Close what `begin_window` opened; the outermost call releases the pin."""
        assert self._local.depth > 0, "no window is open"
        self._local.depth -= 1
        if self._local.depth == 0:
            assert self._local.window is not None
            self.experts.handles.release(self._local.window)
            self._local.window = self._local.words = None

    def forward(
        self, layer: int, functions: LayerFunctions, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Experts of MoE layer `layer`: hidden [tokens, hidden], ids and weights [tokens, top_k]."""
        assert self._local.words is not None, "the experts were called outside of the model's forward"
        count = self.experts.shape.experts
        words = self._local.words[layer * count : (layer + 1) * count]
        return self.kernel.forward(ExpertsCall(hidden, ids, weights, words, functions))


class _Windows(threading.local):
    """The open window of each thread."""

    depth = 0
    window: Window | None = None
    words: Words | None = None
