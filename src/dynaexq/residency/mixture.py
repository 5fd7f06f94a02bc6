"""What a cache with a second shelf knows: which needs go to low versions, and what reads of either take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynaexq.policy.caching import CacheMap, Mask, Places
from dynaexq.policy.mixing import Costs, MixingOptions, pick_low, weigh_choices
from dynaexq.residency.shelf import Shelf

KEEP = 0.9
"""Of what is known of seconds, where another figure comes in."""


class SecondTier(NamedTuple):
    """Low versions beside those of a cache: which, for how many there are blocks, and when they are used."""

    tier: str
    capacity: int
    policy: str
    options: MixingOptions


class Mixture:
    """Splits needs between two shelves. Called under the cache's lock."""

    def __init__(self, second: SecondTier, size: int, experts: int) -> None:
        """Of `size` experts, so many in each layer."""
        self.second = second
        self.levels: Places = np.zeros(size, np.int64)
        """At which shelf experts ran last."""
        self._experts, self._weights = experts, np.ones(experts)
        self._high, self._low = 0.0, 0.0
        self._layer = 0.0

    def look(self, ids: Places) -> None:
        """A layer's tokens chose ids [tokens, top_k]."""
        self._weights = weigh_choices(ids, self._experts)

    def note_read(self, shelf: int, seconds: float) -> None:
        """A read took so long."""
        if shelf:
            self._low = _renew(self._low, seconds)
        else:
            self._high = _renew(self._high, seconds)

    def note_layer(self, seconds: float) -> None:
        """A layer computed so long."""
        self._layer = _renew(self._layer, seconds)

    def split(self, places: Places, high: Shelf, low: Shelf) -> Mask:
        """Who of distinct experts of a layer runs at the low version."""
        here = high.map.resident[places] | high.map.loading[places]
        chosen = pick_low(
            self.second.policy,
            self._weights[places % self._experts],
            here,
            low.map.resident[places],
            low.map.capacity,
            Costs(self._high, self._low, self._layer),
            self.second.options.patience,
        )
        self.levels[places] = chosen
        return chosen

    @staticmethod
    def describe(low: CacheMap, high: CacheMap) -> dict[str, float]:
        """Blocks of low versions, needs that ran at them, which share of all that is, and how many were read for it."""
        uses = low.hits + low.misses
        return {
            "low_capacity": low.capacity,
            "low_uses": uses,
            "low_share": uses / max(1, uses + high.hits + high.misses),
            "low_loads": low.misses,
        }


def _renew(known: float, seconds: float) -> float:
    return seconds if not known else KEEP * known + (1 - KEEP) * seconds
