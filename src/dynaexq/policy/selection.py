"""Which experts get the high-precision slots: top-n by layer, with hysteresis (dynaexq paper, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynaexq.core import OptionError
from dynaexq.policy.hotness import Scores

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class SelectionOptions:
    """Hysteresis against thrash; zeros mean plain top-n.

    Args:
        margin: an outsider replaces a member only if its score is above the member's by more than this (a score
            of 1 is the traffic of a layer's average expert).
        rank_slack: and only if the outsider ranks this far inside the top n, and the member this far outside.
    """

    margin: float = 0.0
    rank_slack: int = 0

    def check(self) -> None:
        """Raise OptionError for values out of range."""
        if not (self.margin >= 0 and self.rank_slack >= 0):
            raise OptionError(f"hysteresis margin {self.margin} and rank slack {self.rank_slack} must not be negative")


def select_high(scores: Scores, current: Mask, capacity: Counts, options: SelectionOptions) -> Mask:
    """The wanted high set of every layer.

    A set over its capacity is cut to its hottest members. Free slots go to the hottest outsiders that have any traffic.
    Beyond that the k-th hottest outsider is paired with the k-th coldest member and takes its place only if
    hysteresis allows, so a set never exceeds its capacity and never gives up a member without a hotter one for it.

    Args:
        scores: hotness [layers, experts], not negative.
        current: the high set in force or on its way, [layers, experts].
        capacity: slots by layer (`n_hi`), [layers].

    Returns:
        The wanted set, [layers, experts].
    """
    places = _rank(scores) + np.arange(len(scores))[:, None] * scores.shape[1]
    ranked = scores.ravel().take(places)  # everything below is in order of rank: column 0 is a layer's hottest expert
    before = current.ravel().take(places)
    wanted = before & (np.cumsum(before, 1) <= capacity[:, None])
    free = capacity - wanted.sum(1)
    if (free > 0).any():
        outsiders = ~wanted & (ranked > 0)
        wanted |= outsiders & (np.cumsum(outsiders, 1) <= free[:, None])
    _swap(ranked, wanted, capacity, options)
    result = current.copy()
    changed = wanted != before
    result.ravel()[places[changed]] = wanted[changed]
    return result


def pick_hottest(scores: Scores, capacity: Counts) -> Mask:
    """The hottest `capacity` [layers] experts of each layer, experts without traffic included: a static map."""
    wanted = np.zeros(scores.shape, bool)
    np.put_along_axis(wanted, _rank(scores), np.arange(scores.shape[1]) < capacity[:, None], 1)
    return wanted


INDEX_BITS = 12
"""Low bits of a score given up for the expert's index: up to 4,096 experts, 40 bits of the score kept."""


def _rank(scores: Scores) -> Counts:
    """Experts of each layer from the hottest down, [layers, experts]; of equal scores the first expert is hotter.

    Sorting integers that carry the index is several times as fast as an argsort.
    """
    experts = scores.shape[1]
    assert experts <= 1 << INDEX_BITS
    bits = np.ascontiguousarray(scores, np.float64).view(np.int64)  # floats that are not negative sort like their bits
    keys = bits >> INDEX_BITS << INDEX_BITS | np.arange(experts - 1, -1, -1)
    keys.sort(1)
    order: Counts = experts - 1 - (keys[:, ::-1] & (1 << INDEX_BITS) - 1)
    return order


def _swap(ranked: Scores, wanted: Mask, capacity: Counts, options: SelectionOptions) -> None:
    """Exchange the k-th hottest outsider and the k-th coldest member while hysteresis allows; `wanted` changes."""
    ranks = np.arange(ranked.shape[1])
    entering = ~wanted & (ranks < (capacity - options.rank_slack)[:, None])
    leaving = wanted & (ranks >= (capacity + options.rank_slack)[:, None])
    rows = np.flatnonzero(_best_beats_worst(ranked, entering, leaving, options.margin))
    if len(rows):  # in a settled system that is few layers, mostly none
        wanted[rows] = _swap_rows(ranked[rows], wanted[rows], entering[rows], leaving[rows], options.margin)


def _best_beats_worst(ranked: Scores, entering: Mask, leaving: Mask, margin: float) -> Mask:
    rows, last = np.arange(len(ranked)), ranked.shape[1] - 1
    best, worst = entering.argmax(1), last - leaving[:, ::-1].argmax(1)
    both = entering[rows, best] & leaving[rows, worst]
    beats: Mask = both & (ranked[rows, best] > ranked[rows, worst] + margin)
    return beats


def _swap_rows(ranked: Scores, wanted: Mask, entering: Mask, leaving: Mask, margin: float) -> Mask:
    in_layer, in_rank = np.nonzero(entering)
    out_layer, out_rank = np.nonzero(leaving[:, ::-1])
    out_rank = ranked.shape[1] - 1 - out_rank
    nth_in, nth_out = _count_within(in_layer), _count_within(out_layer)
    pairs = 1 + int(min(nth_in.max(), nth_out.max()))
    hottest, coldest = np.full((len(ranked), pairs), -np.inf), np.full((len(ranked), pairs), np.inf)
    inside, outside = nth_in < pairs, nth_out < pairs
    hottest[in_layer[inside], nth_in[inside]] = ranked[in_layer[inside], in_rank[inside]]
    coldest[out_layer[outside], nth_out[outside]] = ranked[out_layer[outside], out_rank[outside]]
    swaps = (hottest > coldest + margin).sum(1)
    enters, leaves = nth_in < swaps[in_layer], nth_out < swaps[out_layer]
    wanted[in_layer[enters], in_rank[enters]] = True
    wanted[out_layer[leaves], out_rank[leaves]] = False
    return wanted


def _count_within(groups: Counts) -> Counts:
    """0, 1, 2, ... within each run of equal values of a sorted array."""
    starts = np.searchsorted(groups, groups)
    counts: Counts = np.arange(len(groups)) - starts
    return counts
