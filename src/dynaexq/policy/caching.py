"""Which experts a cache gives up when others need their blocks. Pure: experts are numbered through all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from dynaexq.policy.hotness import Scores
from dynaexq.policy.prediction import Predictor

Places = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

HALF_LIFE = 16
"""Forward passes after which a use counts half (`lfu`): between 8 and 32, this is better than who was needed last for
one sequence, and as good as counting for good for many (benchmarks/offload.py)."""

LARGEST = 1e100
FOREMOST = 1e9
"""Worth of the standing set: more than any other's, less than that of who is needed right now."""

RAREST = 1e-3
"""Chance that an expert is needed in a pass, at least: of those rarer, the nearer layer's are kept."""


class CachePolicy(Protocol):
    """What every expert is worth to a cache, [experts of all layers]: whoever is worth least goes first."""

    @property
    def worth(self) -> Scores:
        """Of every expert, now."""

    def note(self, places: Places) -> None:
        """A layer needs the experts at `places`, each once, now."""


class LeastRecent:
    """`lru`: whoever was needed last is worth most."""

    def __init__(self, size: int, layers: int) -> None:
        self.worth: Scores = np.zeros(size)
        self._now = 0.0

    def note(self, places: Places) -> None:
        """See CachePolicy."""
        self._now += 1.0
        self.worth[places] = self._now


class TwoTier:
    """`two-tier`: experts needed twice within the last HALF_LIFE passes stay longer than all others; both by who was
    needed last (after the two-tier LRU of arXiv 2510.26730)."""

    def __init__(self, size: int, layers: int) -> None:
        self._last, self._before = np.zeros(size), np.full(size, -np.inf)
        self._now, self._span = 0.0, HALF_LIFE * layers

    @property
    def worth(self) -> Scores:
        """See CachePolicy."""
        upper = self._now - self._before <= self._span
        return self._last + np.where(upper, self._now, 0.0)

    def note(self, places: Places) -> None:
        """See CachePolicy."""
        self._now += 1.0
        self._before[places], self._last[places] = self._last[places], self._now


class LeastFrequent:
    """`lfu`: whoever was needed most often is worth most, where uses count less the longer they are ago."""

    def __init__(self, size: int, layers: int) -> None:
        self.worth: Scores = np.zeros(size)
        self._weight, self._growth = 1.0, 2.0 ** (1 / (HALF_LIFE * layers))

    def note(self, places: Places) -> None:
        """See CachePolicy."""
        self.worth[places] += self._weight
        self._weight *= self._growth  # instead of making all others less
        if self._weight > LARGEST:
            self.worth /= self._weight
            self._weight = 1.0


class Foreseen:
    """`expertflow`: whoever is expected to be needed last goes first (ExpertFlow, section 3).

    Layers share all blocks, by what a predictor expects of each, and as soon as it expects something else. The worth
    of an expert is how soon its next use is expected, in layers: those until its layer runs next, and a whole pass more
    for each time that it is not needed there.
    """

    def __init__(self, predictor: Predictor, layers: int) -> None:
        self.standing: Mask | None = None
        """Experts that stay whatever is predicted; None: no such."""
        self._predictor, self._layers = predictor, layers
        self._experts = len(predictor.likely) // layers
        self._layer_of = np.repeat(np.arange(layers), self._experts)
        self._layer = layers - 1
        self._worth: Scores | None = None

    def note(self, places: Places) -> None:
        """See CachePolicy."""
        if len(places):
            self._layer, self._worth = int(places[0]) // self._experts, None

    @property
    def worth(self) -> Scores:
        """See CachePolicy. As of when a layer last needed experts: predictions change just before that."""
        if self._worth is None:
            self._worth = self._weigh()
        return self._worth

    def _weigh(self) -> Scores:
        likely, usual = self._predictor.likely, self._predictor.usual
        passes = (1 - likely) / np.maximum(usual, RAREST)
        worth = -((self._layer_of - self._layer - 1) % self._layers + 1 + self._layers * passes)
        return worth if self.standing is None else worth + FOREMOST * self.standing


CACHE_POLICIES: dict[str, Callable[[int, int], CachePolicy]] = {
    "lru": LeastRecent,
    "two-tier": TwoTier,
    "lfu": LeastFrequent,
}
"""For so many experts in so many layers, by the names of modes: those that read when experts are needed."""

FLOW = "expertflow"
CACHE_MODES = (*CACHE_POLICIES, FLOW)
"""Modes that hold some experts; `expertflow` also reads ahead."""


class CacheMap:
    """Who is resident in a cache of `capacity` experts, and who leaves for whom: pure, for engine and simulator."""

    def __init__(self, size: int, capacity: int, policy: CachePolicy) -> None:
        """Of `size` experts none is resident yet."""
        assert capacity > 0
        self.capacity, self.policy = capacity, policy
        self.resident: Mask = np.zeros(size, np.bool_)
        self.loading: Mask = np.zeros(size, np.bool_)
        """Who has a block, and will be resident."""
        self.hits = self.misses = 0
        """Needs of layers for distinct experts that were met by resident ones, and that were not."""
        self.late = 0
        """Those of `misses` that were on their way."""
        self.useful = self.wasted = 0
        """Experts that were read ahead, and needed, or given up before they were."""
        self._pinned: Places = np.zeros(0, np.int64)
        self._unused: Mask = np.zeros(size, np.bool_)
        self._held = 0

    def split(self, places: Places) -> list[Places]:
        """Distinct experts that a layer needs, in groups that fit; those that are resident come first."""
        if len(places) <= self.capacity:
            return [places]
        here = self.resident[places]
        ordered = np.concatenate((places[here], places[~here]))
        return [ordered[start : start + self.capacity] for start in range(0, len(ordered), self.capacity)]

    def fits(self, places: Places) -> bool:
        """Whether `need` can make room: not while too many others are on their way."""
        others = np.count_nonzero(self.loading) - np.count_nonzero(self.loading[places])
        return bool(len(places) + others <= self.capacity)

    def need(self, places: Places) -> tuple[Places, Places]:
        """A layer needs distinct experts, no more than fit: who must be read, and who has left to make room for them.

        They stay until the next call. `admit` or `withdraw` must follow for all that are read.
        """
        self.policy.note(places)
        here, coming = self.resident[places], self.loading[places]
        self.useful += int(np.count_nonzero(self._unused[places] & (here | coming)))
        self._unused[places] = False
        missing = places[~(here | coming)]
        self.hits += int(np.count_nonzero(here))
        self.misses += len(places) - int(np.count_nonzero(here))
        self.late += int(np.count_nonzero(coming))
        self._pinned = places
        victims = self._make_room(len(missing))
        assert victims is not None, "a cache holds more than a layer needs at once"
        self._hold(missing)
        return missing, victims

    def foresee(self, place: int) -> Places | None:
        """Make room for an expert that will be needed: who has left for it, or None where everybody else is worth more.

        `admit` or `withdraw` must follow.
        """
        assert not (self.resident[place] or self.loading[place])
        victims = self._make_room(1, float(self.policy.worth[place]))
        if victims is not None:
            self._hold(np.array([place]))
            self._unused[place] = True
        return victims

    def admit(self, places: Places) -> None:
        """Experts that were read are resident."""
        self.resident[places], self.loading[places] = True, False

    def withdraw(self, places: Places) -> None:
        """Experts could not be read, and give their blocks back."""
        self.loading[places] = self._unused[places] = False
        self._held -= len(places)

    def unpin(self) -> None:
        """No layer runs: everybody can leave."""
        self._pinned = self._pinned[:0]

    def describe(self) -> dict[str, float]:
        """Experts that can be resident, how often those who were needed were, and what reading ahead brought."""
        hit_rate = self.hits / max(1, self.hits + self.misses)
        counts = {name: getattr(self, name) for name in ("capacity", "hits", "misses", "late", "useful", "wasted")}
        return {**counts, "hit_rate": hit_rate}

    def check_integrity(self) -> int:
        """Assert that nobody is both resident and on the way; returns how many are either."""
        assert not (self.resident & self.loading).any()
        assert self._held == np.count_nonzero(self.resident | self.loading) <= self.capacity
        return self._held

    def _make_room(self, count: int, limit: float = np.inf) -> Places | None:
        """Who leaves so that `count` more fit; None where those that can leave are not worth less than `limit`."""
        lacking = self._held + count - self.capacity
        if lacking <= 0:
            return self._pinned[:0]
        worth = np.where(self.resident, self.policy.worth, np.inf)
        worth[self._pinned] = np.inf
        victims = np.argpartition(worth, lacking - 1)[:lacking]
        if worth[victims].max() >= limit:
            return None
        self.wasted += int(np.count_nonzero(self._unused[victims]))
        self.resident[victims] = self._unused[victims] = False
        self._held -= lacking
        return victims

    def _hold(self, places: Places) -> None:
        self.loading[places] = True
        self._held += len(places)
