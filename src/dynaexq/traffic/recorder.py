"""What routers chose, handed over by reference: the token path appends, the control loop adds up."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

from dynaexq.core import ModelShape, OptionError

SIGNALS = ("count", "mass")


def check_signal(signal: str) -> None:
    """Raise OptionError for an unknown hotness signal."""
    if signal not in SIGNALS:
        raise OptionError(f"unknown hotness signal '{signal}'; known signals are {', '.join(SIGNALS)}")


class RoutedLayer(NamedTuple):
    """One layer of one forward pass: ids [tokens, top_k] and routing weights [tokens, top_k]."""

    layer: int
    ids: torch.Tensor
    weights: torch.Tensor


class Traffic(NamedTuple):
    """Traffic since the last collection, each [layers, experts]; `high` is the part that ran at the high tier."""

    prefill: np.ndarray[Any, np.dtype[np.float64]]
    decode: np.ndarray[Any, np.dtype[np.float64]]
    high: np.ndarray[Any, np.dtype[np.float64]]
    windows: int


class _Window(NamedTuple):
    layers: list[RoutedLayer]
    prefill: bool
    high: np.ndarray[Any, np.dtype[np.bool_]]


class TrafficRecorder:
    """Windows queue up on the token path without a copy and are added up elsewhere. Thread-safe.

    `signal` is `count` (selections, the dynaexq paper) or `mass` (routed probability).
    """

    def __init__(self, shape: ModelShape, signal: str) -> None:
        check_signal(signal)
        self._shape = shape
        self._signal = signal
        self._windows: deque[_Window] = deque()

    def add(self, layers: list[RoutedLayer], prefill: bool, high: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Take one finished window; `high` [layers * experts] says which experts ran at the high tier."""
        self._windows.append(_Window(layers, prefill, high))

    def collect(self) -> Traffic:
        """Add up and forget what came since the last call."""
        shape = (self._shape.layers, self._shape.experts)
        prefill, decode, high = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        windows = 0
        while self._windows:
            window = self._windows.popleft()
            counts = self._count(window.layers)
            (prefill if window.prefill else decode)[:] += counts
            high += counts * window.high.reshape(shape)
            windows += 1
        return Traffic(prefill, decode, high, windows)

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
