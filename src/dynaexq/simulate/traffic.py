"""Traffic of simulated passes, added up as they go by."""

from __future__ import annotations

import numpy as np

from dynaexq.core import ModelShape
from dynaexq.policy.hotness import Scores
from dynaexq.residency.versions import Levels
from dynaexq.traffic import Traffic
from dynaexq.traffic.recorder import ClosedWindow, Step


class SimulatedTraffic:
    """What a TrafficRecorder gives the control loop, without router choices one by one."""

    def __init__(self, shape: ModelShape, tiers: int) -> None:
        self._shape, self._tiers = (shape.layers, shape.experts), tiers
        self._rows = np.repeat(np.arange(shape.layers), shape.experts)
        self._forget()

    def add(self, window: ClosedWindow) -> None:
        """Real windows do not come here."""
        raise AssertionError("a simulated run has no windows of a model")

    def note(self, counts: Scores, prefill: bool, levels: Levels, steps: list[Step]) -> None:
        """Passes of one kind, one step each, with experts at `levels`; their traffic is `counts` [layers * experts]."""
        (self._prefill if prefill else self._decode)[:] += counts.reshape(self._shape)
        places = levels.ravel().astype(np.int64) * self._shape[0] + self._rows
        size = self._tiers * self._shape[0]
        self._by_tier += np.bincount(places, counts, minlength=size).reshape(self._by_tier.shape)
        self._windows += len(steps)
        if not prefill:
            self._steps += steps

    def collect(self) -> Traffic:
        """Add up and forget what came since the last call."""
        traffic = Traffic(self._prefill, self._decode, self._by_tier, self._windows, self._steps)
        self._forget()
        return traffic

    def _forget(self) -> None:
        self._prefill, self._decode = np.zeros(self._shape), np.zeros(self._shape)
        self._by_tier = np.zeros((self._tiers, self._shape[0]))
        self._windows = 0
        self._steps: list[Step] = []
