"""Has the workload shifted? Router traffic of one interval against what hotness expected."""

from __future__ import annotations

import numpy as np

from dynaexq.policy.hotness import Scores

FEWEST = 20.0
"""Selections of a layer below which its distribution says nothing."""

NOISIEST = 0.4
"""Traffic is saved up over intervals until sampling noise explains no more than this distance."""

WARM_UP = 8
"""Distances to learn the usual fluctuation from before anything counts as a shift."""

MEMORY = 0.1
"""Weight of the newest distance in the usual one, once there are enough for that."""

DEVIATIONS = 4.0
"""Mean absolute deviations that are usual fluctuation: three standard deviations of a normal distribution."""

CLIP = 3.0
"""No more than this many deviations of a distance are learned, for a shift is not usual."""

FLOOR = 0.08
"""A rise of the distance by less than this is no shift, however steady it was before."""


class DriftDetector:
    """Watches the distance between traffic and expectation for jumps that its own past does not explain.

    The distance is the total variation distance of the two distributions over experts, averaged over layers, less what
    sampling alone explains; the two add up as squares, so intervals of all sizes compare. After a shift the lowest
    distance since stands for the usual one: expectations that catch up do not fire again, but a second shift does.

    `distance` is the last one, in 0..1, None before the first.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.distance: float | None = None
        self._traffic: Scores = np.zeros((layers, experts))
        self._expected: Scores = np.zeros((layers, experts))
        self._seen = 0
        self._mean = self._base = self._deviation = 0.0

    @property
    def threshold(self) -> float | None:
        """The distance above which the next interval is a shift; None during the warm-up, when none is."""
        return self._base + max(FLOOR, DEVIATIONS * self._deviation) if self._seen >= WARM_UP else None

    def observe(self, traffic: Scores, expected: Scores) -> bool:
        """Take one interval in; True: the workload has shifted.

        Too little traffic to tell is kept, and judged with that of the next intervals by what was expected before all.

        Args:
            traffic: router selections of the interval, [layers, experts].
            expected: hotness before this interval was folded in, not negative, in any unit, [layers, experts].
        """
        assert traffic.shape == expected.shape == self._traffic.shape
        if not self._traffic.any():
            self._expected[:] = expected
        if not self._expected.any():
            return False
        self._traffic += traffic
        distance, noise = _compare(self._traffic, self._expected)
        if noise > NOISIEST:
            return False
        self._traffic[:] = 0
        threshold, self.distance = self.threshold, distance
        shifted = threshold is not None and distance > threshold
        self._base = max(self._mean, distance if shifted else min(self._base, distance))
        self._learn(distance)
        return shifted

    def _learn(self, distance: float) -> None:
        self._seen += 1
        weight, limit = max(MEMORY, 1 / self._seen), float("inf")
        if self._seen > WARM_UP:
            limit = CLIP * max(self._deviation, FLOOR / DEVIATIONS)
        self._mean += weight * min(max(distance - self._mean, -limit), limit)
        self._deviation += weight * (min(abs(distance - self._base), limit) - self._deviation)


def _compare(traffic: Scores, expected: Scores) -> tuple[float, float]:
    """Distance beyond sampling noise, and that noise: means over the layers that have enough traffic, else infinite."""
    counts, totals = traffic.sum(1), expected.sum(1)
    usable = (counts >= FEWEST) & (totals > 0)
    if not usable.any():
        return 0.0, float("inf")
    if not usable.all():
        traffic, expected, counts, totals = traffic[usable], expected[usable], counts[usable], totals[usable]
    shares = expected / totals[:, None]
    apart = traffic / counts[:, None]
    apart -= shares
    far = np.abs(apart, out=apart).sum() / (2 * len(counts))
    spread = np.subtract(1, shares, out=apart)
    spread *= shares
    spread *= (2 / np.pi / counts)[:, None]
    np.sqrt(spread, out=spread)
    shares *= 2
    noise = np.minimum(spread, shares, out=spread).sum() / (2 * len(counts))
    return float(np.sqrt(max(0.0, far**2 - noise**2))), float(noise)
