"""The standing set of a cache: experts that stay by heat and stability, chosen anew now and then (ExpertFlow, 3)."""

from __future__ import annotations

import numpy as np

from dynaexq.policy.hotness import Scores
from dynaexq.policy.selection import Mask

KEEP = 0.7
"""Weight of the past in heat and its variance."""

BUFFER = 0.1
"""By which part an outsider must beat a member to replace it."""


class StandingSet:
    """`count` experts, chosen every so many tokens by their heat less its standard deviation: those in steady use."""

    def __init__(self, size: int, count: int, every: int) -> None:
        self.members: Mask = np.zeros(size, np.bool_)
        self._count, self._every = count, every
        self._tokens, self._periods = 0, 0
        self._selections = np.zeros(size)
        self._heat, self._square = np.zeros(size), np.zeros(size)

    def note(self, selections: Scores, tokens: int) -> bool:
        """So many tokens selected experts so often, [experts of all layers]; whether members were chosen anew."""
        self._selections += selections
        self._tokens += tokens
        if self._tokens < self._every:
            return False
        heat = self._selections / self._tokens
        keep = KEEP if self._periods else 0.0
        self._heat = keep * self._heat + (1 - keep) * heat
        self._square = keep * self._square + (1 - keep) * heat**2
        self._choose(self._heat - np.sqrt(np.maximum(self._square - self._heat**2, 0)))
        self._periods += 1
        self._tokens = 0
        self._selections[:] = 0
        return True

    def _choose(self, steady: Scores) -> None:
        worth = steady + np.where(self.members, BUFFER * np.abs(steady), 0)
        self.members[:] = False
        if self._count:
            self.members[np.argpartition(-worth, self._count - 1)[: self._count]] = True
