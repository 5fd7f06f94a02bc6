"""Which experts the next token of each sequence is likely to choose, and what sequences need together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dynaexq.policy.caching import Mask, Places

Chances = np.ndarray[Any, np.dtype[np.float32]]

HALF_LIFE = 16
"""Tokens after which a sequence's choices count half."""


class Paths:
    """A moving average of each sequence's own routing, by the slot it is in: how likely its next token chooses every
    expert, [slots, experts of all layers]. A slot keeps the path of its last sequence, as it keeps its tokens."""

    def __init__(self, slots: int, layers: int, experts: int) -> None:
        self.likely: Chances = np.zeros((slots, layers * experts), np.float32)
        self._weight: Chances = np.zeros(slots, np.float32)
        self._firsts = (np.arange(layers) * experts)[:, None, None]
        self._keep = np.float32(0.5 ** (1 / HALF_LIFE))

    @property
    def known(self) -> Mask:
        """Of which slots a path is known."""
        return self._weight > 0

    def begin(self, slot: int, source: int, length: int) -> None:
        """A new sequence in `slot` has its first `length` tokens in common with that of slot `source`."""
        self.likely[slot] = self.likely[source] if length else 0
        self._weight[slot] = (1 - self._keep**length) if self._weight[source] else 0

    def note_tokens(self, slots: Sequence[int], ids: Places) -> None:
        """Each of these sequences had one token, which chose experts ids [layers, sequences, top_k]."""
        rows = np.asarray(slots)
        shares = self._blend(rows, self._keep)
        likely = self.likely[rows] * (1 - shares)[:, None]
        likely[np.arange(len(rows))[:, None], ids + self._firsts] += shares[:, None]
        self.likely[rows] = likely

    def note_prompt(self, slot: int, ids: Places) -> None:
        """A sequence had so many tokens of its prompt, which chose experts ids [layers, tokens, top_k]."""
        tokens = ids.shape[1]
        counts = np.bincount((ids + self._firsts).ravel(), minlength=self.likely.shape[1])
        (share,) = self._blend(np.array([slot]), self._keep**tokens)
        self.likely[slot] += share * (counts.astype(np.float32) / tokens - self.likely[slot])

    def _blend(self, slots: Places, keep: np.float32) -> Chances:
        """Which part of their averages new tokens make up, where `keep` of the old ones' weight stays; of the first,
        all."""
        self._weight[slots] = keep * self._weight[slots] + (1 - keep)
        shares: Chances = (1 - keep) / self._weight[slots]
        return shares


def chance_of_none(likely: Chances) -> Chances:
    """That none of some sequences, [sequences, experts], chooses an expert, [experts]."""
    none: Chances = np.prod(1 - likely, axis=0)
    return none


def distinct_experts(none: Chances) -> float:
    """How many sequences are expected to need together, whom none of them chooses with these chances: sum(1 - p)."""
    return float(none.size - none.sum())
