"""Bootstrap intervals over documents or windows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
RESAMPLES = 4000


class Interval(NamedTuple):
    """A mean per token and its 95 % percentile interval."""

    mean: float
    low: float
    high: float


def bootstrap_mean(sums: Floats, counts: Floats, seed: int = 0) -> Interval:
    """Mean per token of `sums` [units] over `counts` [units] tokens, units drawn with replacement."""
    draws = np.random.default_rng(seed).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = sums[draws].sum(1) / counts[draws].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high))
