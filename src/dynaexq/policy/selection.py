"""Which experts get the high-precision slots: top-n by layer, with hysteresis (dynaexq paper, section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
    members = _fit(scores, current, capacity)
    best = np.where(members, -np.inf, scores).max(1, keepdims=True)
    worst = np.where(members, scores, np.inf).min(1, keepdims=True)
    enter = ~members & (scores > worst + options.margin)
    leave = members & (scores < best - options.margin)
    if options.rank_slack:
        ranks = np.argsort(_rank(scores), 1)
        enter &= ranks < (capacity - options.rank_slack)[:, None]
        leave &= ranks >= (capacity + options.rank_slack)[:, None]
    entering, leaving = _line_up(enter, scores, hottest_first=True), _line_up(leave, scores, hottest_first=False)
    pairs = 1 + min(entering.places.max(initial=-1), leaving.places.max(initial=-1))
    hottest, coldest = _spread(entering, len(scores), pairs, -np.inf), _spread(leaving, len(scores), pairs, np.inf)
    swapped = (hottest > coldest + options.margin).sum(1)
    wanted = members.copy()
    for line, enters in ((entering, True), (leaving, False)):
        moves = line.places < swapped[line.rows]
        wanted[line.rows[moves], line.columns[moves]] = enters
    return wanted


def pick_hottest(scores: Scores, capacity: Counts) -> Mask:
    """The hottest `capacity` [layers] experts of each layer, experts without traffic included: a static map."""
    picked = np.zeros(scores.shape, bool)
    np.put_along_axis(picked, _rank(scores), np.arange(scores.shape[1]) < capacity[:, None], 1)
    return picked


def _rank(scores: Scores) -> Counts:
    """Experts of each layer from the hottest down, [layers, experts]; of equals the first is hotter."""
    return np.argsort(-scores, 1, kind="stable")


def _fit(scores: Scores, current: Mask, capacity: Counts) -> Mask:
    """`current` with rows above their capacity cut, and free slots given to outsiders with traffic."""
    counts = current.sum(1)
    rows = np.flatnonzero(counts != capacity)
    if not len(rows):
        return current
    members, free = current.copy(), (capacity - counts)[rows, None]
    order = _rank(scores[rows])
    inside = np.take_along_axis(current[rows], order, 1)
    outside = ~inside & (np.take_along_axis(scores[rows], order, 1) > 0)
    stay = inside & (np.cumsum(inside, 1) <= capacity[rows, None])
    come = outside & (np.cumsum(outside, 1) <= free)
    fitted = np.empty_like(inside)
    np.put_along_axis(fitted, order, stay | come, 1)
    members[rows] = fitted
    return members


class _Line(NamedTuple):
    """Candidates of all layers, each layer's lined up: row, column, score and place in line, each [candidates]."""

    rows: Counts
    columns: Counts
    scores: Scores
    places: Counts


def _line_up(mask: Mask, scores: Scores, hottest_first: bool) -> _Line:
    """The experts of `mask`, in each layer hottest or coldest first; of equals the first is hotter."""
    flat = np.flatnonzero(mask)  # several times as fast as nonzero
    rows, columns = np.divmod(flat, scores.shape[1])
    found = scores.ravel()[flat]
    order = np.lexsort((columns, -found, rows) if hottest_first else (-columns, found, rows))
    rows = rows[order]
    return _Line(rows, columns[order], found[order], np.arange(len(rows)) - np.searchsorted(rows, rows))


def _spread(line: _Line, layers: int, places: int, fill: float) -> Scores:
    """Scores of the first `places` of each line, [layers, places]."""
    result = np.full((layers, places), fill)
    inside = line.places < places
    result[line.rows[inside], line.places[inside]] = line.scores[inside]
    return result
