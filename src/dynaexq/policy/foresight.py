"""What is read ahead: a predictor's word turned into wishes, in the order in which they are needed. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dynaexq.core import ModelShape, OptionError
from dynaexq.policy.caching import CACHE_POLICIES, CacheMap, Foreseen, Places
from dynaexq.policy.horizon import Horizon
from dynaexq.policy.hotness import Scores
from dynaexq.policy.prediction import Counts, Matrix, Predictor
from dynaexq.policy.standing import StandingSet

EXPECTED = 0.5
"""Experts that are likelier than this count as predicted."""


@dataclass(frozen=True)
class ForesightOptions:
    """Knobs of reading ahead.

    Args:
        lookahead: layers; None: as many as it takes, see horizon.py. 0 reads nothing ahead.
        threshold: chance that an expert is needed, from which it is read.
        standing_share: part of the cache that stays by heat and stability; the rest goes by predictions.
        standing_tokens: after so many tokens the standing set is chosen anew.
    """

    lookahead: int | None = None
    threshold: float = 0.5
    standing_share: float = 0.0
    standing_tokens: int = 1000

    def check(self) -> None:
        """Raise OptionError for values out of range."""
        if self.lookahead is not None and not 0 <= self.lookahead <= 1024:
            raise OptionError(f"lookahead {self.lookahead} is not in 0..1024 layers")
        if not 0 < self.threshold <= 1:
            raise OptionError(f"threshold {self.threshold} is not in (0, 1]")
        if not 0 <= self.standing_share <= 0.95:
            raise OptionError(f"standing_share {self.standing_share} is not in 0..0.95: others need blocks too")
        if self.standing_tokens < 1:
            raise OptionError(f"standing_tokens {self.standing_tokens} is below 1")


class Foresight:
    """Knows which layer runs, and what should be read for the next ones. One forward pass at a time."""

    def __init__(
        self, predictor: Predictor, layers: int, capacity: int, options: ForesightOptions | None = None
    ) -> None:
        """For a cache of `capacity` experts."""
        options = options or ForesightOptions()
        self.predictor, self.policy = predictor, Foreseen(predictor, layers)
        self.horizon = Horizon(layers, options.lookahead)
        self.needed = self.predicted = self.right = 0
        """Distinct experts that layers needed; those that were predicted; both."""
        self.cancelled = 0
        """Wishes that were given up before reading began."""
        size = len(predictor.likely)
        self._layers, self._experts, self._options = layers, size // layers, options
        self._wishes: list[int] = []
        self._standing: StandingSet | None = None
        if count := int(options.standing_share * capacity):
            self._standing = StandingSet(size, min(size, count), options.standing_tokens)
            self.policy.standing = self._standing.members
        self._selections: Scores = np.zeros(size)

    def look(self, layer: int, ids: Places, hidden: Matrix | None) -> Places:
        """`layer` needs the experts that its tokens chose, ids [tokens, top_k]: returns them, each once."""
        return self.look_at(layer, np.bincount(ids.ravel(), minlength=self._experts), len(ids), hidden)

    def look_at(self, layer: int, counts: Counts, tokens: int, hidden: Matrix | None) -> Places:
        """The same where so many of so many tokens chose each expert, counts [experts]."""
        needed, first = np.flatnonzero(counts), layer * self._experts
        expected = self.predictor.likely[first : first + self._experts] > EXPECTED
        self.needed += len(needed)
        self.predicted += int(np.count_nonzero(expected))
        self.right += int(np.count_nonzero(expected[needed]))
        self.predictor.note(layer, counts, hidden)
        if self._standing is not None:
            self._selections[first : first + self._experts] += counts
            if layer == self._layers - 1:
                self._standing.note(self._selections, tokens)
                self._selections[:] = 0
        return needed

    def wish(self, layer: int, cache: CacheMap) -> None:
        """`layer` runs: wish for what the next ones will need, instead of what was wished for before."""
        ahead = min(self.horizon.layers, self._layers)
        found: list[int] = []
        for distance in range(1, ahead + 1):
            first = (layer + distance) % self._layers * self._experts
            rows = slice(first, first + self._experts)
            likely = self.predictor.likely[rows]
            wanted = (likely > self._options.threshold) & ~(cache.resident[rows] | cache.loading[rows])
            places = np.flatnonzero(wanted)
            found += (first + places[np.argsort(-likely[places], kind="stable")]).tolist()
        if self._wishes:
            self.cancelled += len(set(self._wishes).difference(found))
        self._wishes = found[::-1]

    def prefer(self, places: Places) -> None:
        """Wish, last of all, for those of experts that now run at a lower tier that are usually needed."""
        usual = places[self.predictor.usual[places] > self._options.threshold]
        self._wishes = [*usual.tolist(), *self._wishes]

    def drop(self) -> None:
        """Wish for nothing."""
        self.cancelled += len(self._wishes)
        self._wishes = []

    def take(self, cache: CacheMap) -> tuple[int, Places] | None:
        """The next expert to read, for which room was made, and who left for it; None: nothing is worth it."""
        while self._wishes:
            place = self._wishes.pop()
            if cache.resident[place] or cache.loading[place]:
                continue
            victims = cache.foresee(place)
            if victims is not None:
                return place, victims
        return None

    @property
    def waiting(self) -> int:
        """Wishes that nobody has looked at yet."""
        return len(self._wishes)

    def describe(self) -> dict[str, float]:
        """How good predictions were, what became of wishes, and the knobs in force."""
        return {
            "predicted": self.predicted,
            "predicted_right": self.right,
            "recall": self.right / max(1, self.needed),
            "precision": self.right / max(1, self.predicted),
            "horizon": self.horizon.layers,
            "cancelled": self.cancelled,
            "threshold": self._options.threshold,
            "standing_share": self._options.standing_share,
        }


class CacheMind(NamedTuple):
    """What decides over a cache: who is resident, and what is read ahead (None: nothing)."""

    map: CacheMap
    foresight: Foresight | None


def make_cache_mind(mode: str, shape: ModelShape, capacity: int) -> CacheMind:
    """Of a cache that reads on need, by one of CACHE_POLICIES."""
    size = shape.layers * shape.experts
    return CacheMind(CacheMap(size, capacity, CACHE_POLICIES[mode](size, shape.layers)), None)


def make_flow_mind(
    make_predictor: Callable[[], Predictor], shape: ModelShape, capacity: int, options: ForesightOptions
) -> CacheMind:
    """Of mode `expertflow`."""
    foresight = Foresight(make_predictor(), shape.layers, capacity, options)
    return CacheMind(CacheMap(shape.layers * shape.experts, capacity, foresight.policy), foresight)
