"""Levels of experts on a ladder of tiers with so many slots each: one selection at every border between two tiers.

Layers share slots evenly (the dynaexq paper's way, two tiers), or the whole model shares them. Experts are ranked at a
border by what the higher tier saves: hotness times what one selection loses less, and by hotness alone where that is
not known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynaexq.policy.hotness import Scores
from dynaexq.policy.pins import select_beside_pins
from dynaexq.policy.selection import Counts, Mask, SelectionOptions

Levels = np.ndarray[Any, np.dtype[np.int8]]


@dataclass(frozen=True)
class Ladder:
    """Tiers from the highest down.

    Args:
        slots: experts that can be at each tier but the lowest, [tiers - 1, groups]; experts are dealt to groups in
            order: a group for each layer, or one of all.
        drops: what one selection loses less at each tier but the lowest than at the next one, [tiers - 1, layers,
            experts], or None: hotness is all there is.
        held, moved: bytes that an expert takes more at each tier but the lowest than at the next one, and that an
            exchange between the two moves, [tiers - 1]; used with `drops`.
    """

    slots: Counts
    drops: Scores | None
    held: tuple[int, ...]
    moved: tuple[int, ...]

    def gains(self, hotness: Scores) -> Scores:
        """What each border's higher tier saves, [tiers - 1, layers, experts]."""
        return hotness[None] if self.drops is None else hotness[None] * self.drops

    def choose(
        self, hotness: Scores, current: Levels, options: SelectionOptions | None, high: Mask, low: Mask
    ) -> Levels:
        """Wanted levels [layers, experts].

        A border's set is chosen from the set of the border below, so sets are nested. Where gains are losses saved, an
        exchange must save what the bytes it moves are worth, times the margin: so much as the last slot saves with as
        many bytes.

        Args:
            hotness: [layers, experts], not negative.
            current: levels in force or on their way; 0 is the highest.
            options: None picks afresh, whoever is where.
            high, low: pinned to the highest and the lowest tier, [layers, experts].
        """
        gains, groups = self.gains(hotness), self.slots.shape[1]
        levels = np.full(hotness.shape, len(self.slots), np.int8)
        inside = np.ones((groups, hotness.size // groups), np.bool_)
        held_high, held_low = high.reshape(inside.shape), low.reshape(inside.shape)
        price = self._price(gains) if options is not None and self.drops is not None else None
        for border in reversed(range(len(self.slots))):
            capacity = self.slots[: border + 1].sum(0)
            kept = options
            if options is not None and price is not None:
                kept = replace(options, margin=options.margin * price * self.moved[border])
            scores, above = gains[border].reshape(inside.shape), (current <= border).reshape(inside.shape)
            inside = select_beside_pins(scores, above & inside, capacity, kept, held_high, held_low | ~inside)
            levels[inside.reshape(hotness.shape)] = border
        return levels

    def _price(self, gains: Scores) -> float:
        """What a byte saves at the borders: of the expert that just gets a slot, the mean over borders."""
        prices = []
        for border, slots in enumerate(np.cumsum(self.slots.sum(1))):
            ranked = gains[border].ravel()
            if 0 < slots <= ranked.size:
                last = float(np.partition(ranked, ranked.size - slots)[ranked.size - slots])
                prices.append(last / max(1, self.held[border]))
        return sum(prices) / len(prices) if prices else 0.0
