"""Which experts a cache gives up when others need their blocks. Pure: experts are numbered through all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from dynaexq.policy.hotness import Scores

Places = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

HALF_LIFE = 4096
"""Layers of forward passes after which a use counts half (`lfu`)."""

LARGEST = 1e100


class CachePolicy(Protocol):
    """What every expert is worth to a cache, [experts of all layers]: whoever is worth least goes first."""

    worth: Scores

    def note(self, places: Places) -> None:
        """A layer needs the experts at `places`, each once, now."""


class LeastRecent:
    """`lru`: whoever was needed last is worth most."""

    def __init__(self, size: int) -> None:
        self.worth: Scores = np.zeros(size)
        self._now = 0.0

    def note(self, places: Places) -> None:
        self._now += 1.0
        self.worth[places] = self._now


class LeastFrequent:
    """`lfu`: whoever was needed most often is worth most, where uses count less the longer they are ago."""

    def __init__(self, size: int) -> None:
        self.worth: Scores = np.zeros(size)
        self._weight = 1.0

    def note(self, places: Places) -> None:
        self.worth[places] += self._weight
        self._weight *= 2.0 ** (1 / HALF_LIFE)  # instead of making all others less
        if self._weight > LARGEST:
            self.worth /= self._weight
            self._weight = 1.0


CACHE_POLICIES: dict[str, Callable[[int], CachePolicy]] = {"lru": LeastRecent, "lfu": LeastFrequent}


def pick_victims(worth: Scores, evictable: Mask, count: int) -> Places:
    """The `count` of those that are `evictable` that are worth least; of equals the first."""
    found = np.flatnonzero(evictable)
    assert len(found) >= count, "a cache holds more than a layer needs at once"
    return found[np.argsort(worth[found], kind="stable")[:count]]
