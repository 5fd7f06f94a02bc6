"""Which of a layer's missing experts are worth waiting for, where they also have a smaller version. Pure.

After HOBBIT (arXiv 2411.01433), which reads low versions of unimportant experts, with what waiting costs as measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynaexq.core import OptionError
from dynaexq.policy.caching import Mask, Places
from dynaexq.policy.hotness import Scores

WAIT, LOW, AUTO = "wait", "low", "auto"
MISS_POLICIES = (WAIT, LOW, AUTO)
"""Wait for the version that is missed; use the low one, reading it where it is not there; or what pays."""


@dataclass(frozen=True)
class MixingOptions:
    """Knobs of misses.

    Args:
        low_share: part of the bytes of the cache that low versions have.
        patience: with `auto`, how long a layer may wait for reads, in times of its own computing.
    """

    low_share: float = 0.2
    patience: float = 1.0

    def check(self) -> None:
        """Raise OptionError for values out of range."""
        if not 0.01 <= self.low_share <= 0.9:
            raise OptionError(f"low_share {self.low_share} is not in 0.01..0.9")
        if not 0 <= self.patience <= 1000:
            raise OptionError(f"patience {self.patience} is not in 0..1000")


class Costs(NamedTuple):
    """Seconds: a read of either version (0: not known yet), and what a layer computes."""

    high: float
    low: float
    layer: float


def weigh_choices(ids: Places, experts: int) -> Scores:
    """How much the choices [tokens, top_k] of a layer weigh, [experts]: first choices more than later ones."""
    ranks = np.broadcast_to(1 / (1 + np.arange(ids.shape[1])), ids.shape)
    return np.bincount(ids.ravel(), ranks.ravel(), minlength=experts).astype(np.float64)


def pick_low(
    policy: str, weights: Scores, here: Mask, low_here: Mask, room: int, costs: Costs, patience: float
) -> Mask:
    """Who of a layer's experts runs at the low version, [some].

    `weights` say how much each matters, `here` who is resident or on its way as it should be, `low_here` whose low
    version is resident; `room` low versions fit at most.
    """
    low: Mask = np.zeros(len(weights), np.bool_)
    missing = np.flatnonzero(~here)
    order = missing[np.argsort(-weights[missing], kind="stable")]
    waited = 0 if policy == LOW else len(order)
    if policy == AUTO and costs.high and costs.layer:
        waited = _count_waited(low_here[order], costs, patience * costs.layer)
    waited = max(waited, len(order) - room)
    low[order[waited:]] = True
    return low


def _count_waited(low_here: Mask, costs: Costs, budget: float) -> int:
    """How many of missing experts, the most important first, are read as they should be within `budget` seconds."""
    to_read = np.append(np.cumsum(~low_here[::-1])[::-1], 0)  # low versions, where the first so many wait
    seconds = np.arange(len(low_here) + 1) * costs.high + to_read * (costs.low or costs.high)
    within = np.flatnonzero(seconds <= budget)
    return int(within[-1]) if len(within) else 0
