"""Which tier each expert gets when bytes are shared over a whole model: losses against sizes, one price for a byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dynaexq.policy.hotness import Scores

Choices = np.ndarray[Any, np.dtype[np.int64]]


class Allocation(NamedTuple):
    """Tier of every item, an index into the sizes [items], and the loss that the last byte saved."""

    tiers: Choices
    price: float


class _Steps(NamedTuple):
    """Ways up the convex hull of every item's losses: each [steps]."""

    slopes: Scores
    nbytes: Scores
    items: Choices
    tiers: Choices


def allocate(losses: Scores, sizes: Sequence[int], budget: int, least: Choices | None = None) -> Allocation:
    """The tiers with the least loss in all whose sizes stay within `budget`.

    Steps up the convex hull of each item's losses are taken in the order of what a byte saves; those that no longer
    fit are passed over. Optimal but for less than the last step's loss where losses are convex in bytes.

    Args:
        losses: of each item at each tier, [items, tiers], from the smallest tier up.
        sizes: bytes of a version of each tier, rising.
        least: the lowest tier that an item may have, [items]; None: the smallest.
    """
    low = np.zeros(len(losses), np.int64) if least is None else least
    bytes_of = np.asarray(sizes, np.float64)
    left = budget - bytes_of[low].sum()
    assert left >= 0, "the lowest tiers fit"
    steps = _climb(losses, bytes_of, low)
    order = np.argsort(-steps.slopes, kind="stable")
    spent = np.cumsum(steps.nbytes[order])
    fit = int(np.searchsorted(spent, left, side="right"))
    tiers = low.copy()
    np.maximum.at(tiers, steps.items[order[:fit]], steps.tiers[order[:fit]])
    left -= spent[fit - 1] if fit else 0
    price = float(steps.slopes[order[fit - 1]]) if fit else 0.0
    stopped: set[int] = set()
    smallest = np.diff(bytes_of).min(initial=np.inf)
    for step in order[fit:]:
        if left < smallest:
            break
        item = int(steps.items[step])
        if item in stopped:
            continue
        if steps.nbytes[step] <= left:
            left -= steps.nbytes[step]
            tiers[item] = steps.tiers[step]
        else:
            stopped.add(item)
    return Allocation(tiers, price)


def _climb(losses: Scores, sizes: Scores, low: Choices) -> _Steps:
    """From each item's lowest tier the steepest way up, and on from there, until nothing is saved any more."""
    items, found = np.arange(len(losses)), []
    tiers = low
    while len(items):
        current = losses[items, tiers]
        wider = sizes[None, :] - sizes[tiers][:, None]
        slopes = np.where(wider > 0, (current[:, None] - losses[items]) / np.where(wider > 0, wider, 1), 0)
        best = slopes.argmax(1)
        rows = np.arange(len(items))
        slope = slopes[rows, best]
        up = slope > 0
        found.append(_Steps(slope[up], wider[rows, best][up], items[up], best[up]))
        items, tiers = items[up], best[up]
    return _Steps(*(np.concatenate(parts) for parts in zip(*found, strict=True)))
