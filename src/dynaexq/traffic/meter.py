"""Traffic of a model whose versions stay: counted as it comes, decided upon by nobody."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynaexq.core import ModelShape
from dynaexq.traffic.recorder import RoutedLayer, TrafficRecorder


class TrafficMeter:
    """Adds up all traffic of a run (see runtime.WindowListener); `sums` is [layers, experts]."""

    def __init__(self, shape: ModelShape, signal: str = "count") -> None:
        """`signal` is `count` or `mass`. Raises OptionError for others."""
        self.sums = np.zeros((shape.layers, shape.experts))
        self._high = np.zeros(shape.layers)
        self._recorder = TrafficRecorder(shape, signal)

    def before_window(self) -> None:
        """Nothing to decide."""

    def after_window(self, layers: list[RoutedLayer], prefill: bool, high: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Add a window."""
        self._recorder.add(layers, prefill, high)
        traffic = self._recorder.collect()
        self.sums += traffic.prefill + traffic.decode
        self._high += traffic.high.sum(1)

    @property
    def hot_share_high(self) -> float:
        """Share of traffic that ran at the high tier."""
        return float(self._high.sum()) / total if (total := float(self.sums.sum())) else 0.0

    @property
    def layer_shares_high(self) -> list[float]:
        """The same by layer."""
        shares: list[float] = (self._high / np.maximum(self.sums.sum(1), 1)).tolist()
        return shares

    def close(self) -> None:
        """Nothing is open."""
