"""Hotness of every expert: an exponential moving average of router traffic (dynaexq paper, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynaexq.core import OptionError

Scores = np.ndarray[Any, np.dtype[np.float64]]


FULL = 16.0
"""Selections of an average expert that make a whole interval."""


@dataclass(frozen=True)
class HotnessOptions:
    """How traffic becomes hotness.

    Args:
        alpha: weight of the past after an interval with enough traffic, in [0, 1).
        prefill_weight: what one routed token of a prefill counts, where one of a decode step counts 1. Below 1 keeps
            a long prompt from drowning the decode signal.
    """

    alpha: float = 0.9
    prefill_weight: float = 1.0

    def check(self) -> None:
        """Raise OptionError for values out of range."""
        if not 0 <= self.alpha < 1:
            raise OptionError(f"alpha {self.alpha} is not in [0, 1)")
        if not 0 <= self.prefill_weight < float("inf"):
            raise OptionError(f"the prefill weight {self.prefill_weight} is not a number from 0 up")


class Hotness:
    """Scores [layers, experts] in units of a layer's average expert: a layer's mean is 1 once it has seen traffic."""

    def __init__(self, layers: int, experts: int, options: HotnessOptions) -> None:
        options.check()
        self.options = options
        self._sums: Scores = np.zeros((layers, experts))

    def update(self, prefill: Scores, decode: Scores) -> None:
        """Fold one interval's traffic in: `S <- alpha * S + (1 - alpha) * c`, both [layers, experts].

        An interval with less than FULL selections for each expert makes that much less forgotten: what few tokens chose
        is mostly chance, and following it would move versions back and forth.
        """
        alpha, weight = self.options.alpha, self.options.prefill_weight
        self._sums *= alpha ** min(1.0, float((decode + weight * prefill).mean()) / FULL)
        self._sums += (1 - alpha) * decode
        if prefill.any():
            self._sums += (1 - alpha) * weight * prefill

    def fade(self, share: float) -> None:
        """Keep `share` of what was seen so far: what comes now counts for more."""
        self._sums *= share

    @property
    def scores(self) -> Scores:
        """Traffic of every expert over the mean of its layer, [layers, experts]."""
        means = self._sums.mean(1, keepdims=True)
        scores: Scores = self._sums / np.where(means > 0, means, 1)
        return scores

    def restore(self, sums: Scores) -> None:
        """Continue from saved sums [layers, experts]."""
        assert sums.shape == self._sums.shape
        self._sums = sums.astype(np.float64)

    @property
    def sums(self) -> Scores:
        """What `restore` takes."""
        copied: Scores = self._sums.copy()
        return copied
