"""Traffic of simulated passes, added up as they go by."""

from __future__ import annotations

import numpy as np

from dynaexq.core import ModelShape
from dynaexq.policy.hotness import Scores
from dynaexq.residency.versions import Levels
from dynaexq.simulate.feed import Integers
from dynaexq.traffic import Traffic
from dynaexq.traffic.recorder import ClosedWindow, Step


class TierTally:
    """Traffic by tier and layer, while experts change their tiers.

    All that an expert had is counted at the tier it is at; what it had before a change is put right beside that, so
    that a change costs as much as there are experts in it.
    """

    def __init__(self, tiers: int, levels: Levels) -> None:
        """`levels` [layers, experts] to begin with."""
        self._experts, self._levels = levels.shape[1], levels.ravel().astype(np.int64)
        self._rows = np.arange(levels.size) // self._experts
        self._counts, self._corrections = np.zeros(levels.size), np.zeros((tiers, levels.shape[0]))

    def add(self, counts: Scores) -> None:
        """More traffic, [layers * experts]."""
        self._counts += counts

    def move(self, places: Integers, levels: Integers) -> None:
        """Experts at `places` are at `levels` from now on."""
        before, rows = self._counts[places], self._rows[places]
        np.add.at(self._corrections, (self._levels[places], rows), before)
        np.add.at(self._corrections, (levels, rows), -before)
        self._levels[places] = levels

    def take(self) -> Scores:
        """All traffic since the last call, [tiers, layers]."""
        tiers, layers = self._corrections.shape
        places = self._levels * layers + self._rows
        found = np.bincount(places, self._counts, minlength=tiers * layers).reshape(tiers, layers) + self._corrections
        self._counts[:], self._corrections[:] = 0, 0
        return found


class SimulatedTraffic:
    """What a TrafficRecorder gives the control loop, without router choices one by one."""

    def __init__(self, shape: ModelShape, tiers: int) -> None:
        self._shape, self._tiers = (shape.layers, shape.experts), tiers
        self._tally = TierTally(tiers, np.zeros(self._shape, np.int8))
        self._forget()

    def add(self, window: ClosedWindow) -> None:
        """Real windows do not come here."""
        raise AssertionError("a simulated run has no windows of a model")

    def move(self, places: Integers, levels: Integers) -> None:
        """Experts at `places` are at `levels` from now on; all are at level 0 before."""
        self._tally.move(places, levels)

    def note(self, counts: Scores, prefill: bool, passes: int, steps: list[Step]) -> None:
        """Passes of one kind; their traffic is `counts` [layers * experts], and the steps those that decode."""
        (self._prefill if prefill else self._decode)[:] += counts.reshape(self._shape)
        self._tally.add(counts)
        self._windows += passes
        self._steps += steps

    def collect(self) -> Traffic:
        """Add up and forget what came since the last call."""
        traffic = Traffic(self._prefill, self._decode, self._tally.take(), self._windows, self._steps)
        self._forget()
        return traffic

    def _forget(self) -> None:
        self._prefill, self._decode = np.zeros(self._shape), np.zeros(self._shape)
        self._windows = 0
        self._steps: list[Step] = []
