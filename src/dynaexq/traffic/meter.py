"""Traffic of a model whose versions stay: counted as it comes, decided upon by nobody."""

from __future__ import annotations

import numpy as np

from dynaexq.core import ModelShape
from dynaexq.traffic.recorder import ClosedWindow, TrafficRecorder
from dynaexq.traffic.shares import TierShares


class TrafficMeter:
    """Adds up all traffic of a run (see runtime.WindowListener); `sums` is [layers, experts]."""

    def __init__(self, shape: ModelShape, signal: str = "count", tiers: int = 1) -> None:
        """`signal` is `count` or `mass`; `tiers` are in the format table. Raises OptionError for others."""
        self.sums = np.zeros((shape.layers, shape.experts))
        self._by_tier = np.zeros((tiers, shape.layers))
        self._recorder = TrafficRecorder(shape, tiers, signal)

    def before_window(self) -> None:
        """Nothing to decide."""

    def after_window(self, window: ClosedWindow) -> None:
        """Add a window."""
        self._recorder.add(window)
        traffic = self._recorder.collect()
        self.sums += traffic.prefill + traffic.decode
        self._by_tier += traffic.by_tier

    @property
    def shares(self) -> TierShares:
        """At which tiers traffic ran."""
        return TierShares(self._by_tier)

    def close(self) -> None:
        """Nothing is open."""
