"""What routers chose, handed over by reference: the token path appends, the control loop adds up."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dynaexq.core import ModelShape, OptionError

SIGNALS = ("count", "mass")


def check_signal(signal: str) -> None:
    """Raise OptionError for an unknown hotness signal."""
    if signal not in SIGNALS:
        raise OptionError(f"unknown hotness signal '{signal}'; known signals are {', '.join(SIGNALS)}")


Levels = np.ndarray[Any, np.dtype[np.int64]]
"""Place of every expert's tier in the format table, [layers * experts]; 0 is the highest."""


class RoutedLayer(NamedTuple):
    """One layer of one forward pass: ids [tokens, top_k] and routing weights [tokens, top_k]; where it is wanted, what
    the router was given, float16 [tokens, hidden]."""

    layer: int
    ids: torch.Tensor
    weights: torch.Tensor
    hidden: torch.Tensor | None = None


class Step(NamedTuple):
    """What a decode step took: seconds, tokens, and whether versions moved meanwhile."""

    seconds: float
    tokens: int
    moving: bool


class Traffic(NamedTuple):
    """Traffic since the last collection, [layers, experts], and how much of each layer's ran at each tier of the format
    table, [tiers, layers]; windows, and the decode steps among them."""

    prefill: np.ndarray[Any, np.dtype[np.float64]]
    decode: np.ndarray[Any, np.dtype[np.float64]]
    by_tier: np.ndarray[Any, np.dtype[np.float64]]
    windows: int
    steps: list[Step]


class TokenRun(NamedTuple):
    """Tokens in a row of one forward pass: the number of their request, how many, whether they belong to its prompt."""

    request: int
    tokens: int
    prefill: bool


class ClosedWindow(NamedTuple):
    """One finished forward pass: its routing, whether it was a prefill, at which tier experts ran [layers * experts],
    how many seconds it took, and whether versions moved meanwhile; when it began, and whose tokens it was of, where
    that is known."""

    layers: list[RoutedLayer]
    prefill: bool
    levels: Levels
    seconds: float = 0.0
    moving: bool = False
    opened: float = 0.0
    runs: Sequence[TokenRun] = ()


class TrafficRecorder:
    """Windows queue up on the token path without a copy and are added up elsewhere. Thread-safe.

    `signal` is `count` (selections, the dynaexq paper) or `mass` (routed probability).
    """

    def __init__(self, shape: ModelShape, tiers: int, signal: str) -> None:
        check_signal(signal)
        self._shape, self._tiers = shape, tiers
        self._signal = signal
        self._windows: deque[ClosedWindow] = deque()

    def add(self, window: ClosedWindow) -> None:
        """Take one finished window."""
        self._windows.append(window)

    def collect(self) -> Traffic:
        """Add up and forget what came since the last call."""
        shape = (self._shape.layers, self._shape.experts)
        prefill, decode, by_tier = np.zeros(shape), np.zeros(shape), np.zeros((self._tiers, shape[0]))
        rows = np.repeat(np.arange(shape[0]), shape[1])
        windows, steps = 0, []
        while self._windows:
            window = self._windows.popleft()
            counts = self._count(window.layers)
            (prefill if window.prefill else decode)[:] += counts
            places = window.levels * shape[0] + rows
            by_tier += np.bincount(places, counts.ravel(), minlength=by_tier.size).reshape(by_tier.shape)
            windows += 1
            if window.layers and window.seconds > 0 and not window.prefill:
                steps.append(Step(window.seconds, len(window.layers[0].ids), window.moving))
        return Traffic(prefill, decode, by_tier, windows, steps)

    def _count(self, layers: list[RoutedLayer]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Traffic of one window, [layers, experts]: one count over all layers, whose experts are numbered through."""
        shape = (self._shape.layers, self._shape.experts)
        if not layers:
            return np.zeros(shape)
        starts = np.array([routed.layer * shape[1] for routed in layers])
        sizes = [routed.ids.numel() for routed in layers]
        places = torch.cat([routed.ids for routed in layers]).numpy().ravel() + np.repeat(starts, sizes)
        mass = None
        if self._signal == "mass":
            mass = torch.cat([routed.weights for routed in layers]).detach().float().numpy().ravel()
        return np.bincount(places, mass, minlength=shape[0] * shape[1]).reshape(shape).astype(np.float64)
