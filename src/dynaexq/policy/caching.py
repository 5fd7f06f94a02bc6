"""Which experts a cache gives up when others need their blocks. Pure: experts are numbered through all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from dynaexq.policy.hotness import Scores

Places = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

HALF_LIFE = 16
"""Forward passes after which a use counts half (`lfu`): between 8 and 32, this is better than who was needed last for
one sequence, and as good as counting for good for many (benchmarks/offload.py)."""

LARGEST = 1e100


class CachePolicy(Protocol):
    """What every expert is worth to a cache, [experts of all layers]: whoever is worth least goes first."""

    worth: Scores

    def note(self, places: Places) -> None:
        """A layer needs the experts at `places`, each once, now."""


class LeastRecent:
    """`lru`: whoever was needed last is worth most."""

    def __init__(self, size: int, layers: int) -> None:
        self.worth: Scores = np.zeros(size)
        self._now = 0.0

    def note(self, places: Places) -> None:
        self._now += 1.0
        self.worth[places] = self._now


class LeastFrequent:
    """`lfu`: whoever was needed most often is worth most, where uses count less the longer they are ago."""

    def __init__(self, size: int, layers: int) -> None:
        self.worth: Scores = np.zeros(size)
        self._weight, self._growth = 1.0, 2.0 ** (1 / (HALF_LIFE * layers))

    def note(self, places: Places) -> None:
        self.worth[places] += self._weight
        self._weight *= self._growth  # instead of making all others less
        if self._weight > LARGEST:
            self.worth /= self._weight
            self._weight = 1.0


CACHE_POLICIES: dict[str, Callable[[int, int], CachePolicy]] = {"lru": LeastRecent, "lfu": LeastFrequent}
"""For so many experts in so many layers, by the names of modes."""


class CacheMap:
    """Who is resident in a cache of `capacity` experts, and who leaves for whom: pure, for engine and simulator."""

    def __init__(self, size: int, capacity: int, policy: CachePolicy) -> None:
        """Of `size` experts none is resident yet."""
        assert capacity > 0
        self.capacity, self.policy = capacity, policy
        self.resident: Mask = np.zeros(size, np.bool_)
        self.hits = self.misses = 0
        """Needs of layers for distinct experts that were met by resident ones, and that were not."""
        self._held = 0

    def split(self, places: Places) -> list[Places]:
        """Distinct experts that a layer needs, in groups that fit; those that are resident come first."""
        if len(places) <= self.capacity:
            return [places]
        here = self.resident[places]
        ordered = np.concatenate((places[here], places[~here]))
        return [ordered[start : start + self.capacity] for start in range(0, len(ordered), self.capacity)]

    def need(self, places: Places) -> tuple[Places, Places]:
        """A layer needs distinct experts, no more than fit: who is missing, and who has left to make room for them.

        `admit` must follow for those that came.
        """
        self.policy.note(places)
        missing = places[~self.resident[places]]
        self.hits += len(places) - len(missing)
        self.misses += len(missing)
        lacking = self._held + len(missing) - self.capacity
        if lacking <= 0:
            return missing, missing[:0]
        worth = np.where(self.resident, self.policy.worth, np.inf)
        worth[places] = np.inf
        victims = np.argpartition(worth, lacking - 1)[:lacking]
        assert worth[victims].max() < np.inf, "a cache holds more than a layer needs at once"
        self.resident[victims] = False
        self._held -= lacking
        return missing, victims

    def describe(self) -> dict[str, float]:
        """Experts that can be resident, and how often those who were needed were."""
        hit_rate = self.hits / max(1, self.hits + self.misses)
        return {"capacity": self.capacity, "hits": self.hits, "misses": self.misses, "hit_rate": hit_rate}

    def admit(self, places: Places) -> None:
        """Experts have become resident."""
        self.resident[places] = True
        self._held += len(places)
