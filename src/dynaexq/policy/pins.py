"""Experts that people hold at a tier, whatever traffic says."""

from __future__ import annotations

import numpy as np

from dynaexq.policy.hotness import Scores
from dynaexq.policy.selection import Counts, Mask, SelectionOptions, pick_hottest, select_high

NEVER, LEAST = -1.0, 1e-300
"""A score below all others, for hotness is not negative; and what makes no traffic some."""


def select_beside_pins(
    scores: Scores, current: Mask, capacity: Counts, options: SelectionOptions | None, high: Mask, low: Mask
) -> Mask:
    """The wanted high set: all of `high`, none of `low`, and of the others what `select_high` says for the slots left.

    Args:
        options: None picks the hottest afresh, whoever is high now.
        high, low: disjoint, [layers, experts]; `high` is within `capacity` [layers].
    """
    pinned = high | low
    left, others = capacity - high.sum(1), scores
    if pinned.any():  # slots that pins leave empty are filled, by experts without traffic if need be
        others = np.where(pinned, NEVER, scores + LEAST)
    if options is None:
        return (pick_hottest(others, left) & ~pinned) | high
    return select_high(others, current & ~pinned, left, options) | high
