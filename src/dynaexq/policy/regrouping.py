"""Which of the decoding sequences take part in the next step, and which waiting request is admitted next. Pure.

Some experts are resident (policy/caching.py), and one load serves all tokens of a step. Where sequences that need the
same experts run together and others pause, a step's need fits the cache (ExpertFlow, section 4). Tokens of a sequence
stay in order: a step takes one of each sequence at most. Time is an argument, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynaexq.core import OptionError
from dynaexq.policy.hotness import Scores
from dynaexq.policy.paths import Chances, Paths, chance_of_none, distinct_experts

GRANULARITIES = ("batch", "sequence", "token")
DEFAULT = "batch"

FEW = 2
"""So many sequences always run together: there is nothing to choose that would pay for choosing."""


NOTHING = 1e-3
"""Experts more that count as none."""


def check_granularity(granularity: str) -> None:
    """Raise OptionError for an unknown one."""
    if granularity not in GRANULARITIES:
        raise OptionError(f"unknown granularity '{granularity}'; known are {', '.join(GRANULARITIES)}")


@dataclass(frozen=True)
class RegroupingOptions:
    """Knobs of token scheduling.

    Args:
        granularity: `batch` (all decoding sequences take part in every step), `sequence` (a group with similar paths
            keeps running for a quantum, then another), or `token` (the group is chosen anew before each step).
        quantum: steps for which a group keeps running.
        timeout_ms: who was left out for longer takes part in the next step, whatever it needs.
        ageing: experts more that somebody may need for every second of waiting.
        min_batch: sequences that a step takes at least, if so many are there.
        admit_window: waiting requests of one priority among which the next to be admitted is chosen, by what it is
            expected to need beside those that run; 1: in order of arrival.
    """

    granularity: str = DEFAULT
    quantum: int = 8
    timeout_ms: float = 20.0
    ageing: float = 50.0
    min_batch: int = 2
    admit_window: int = 1

    @property
    def groups(self) -> bool:
        """Whether sequences may be left out of a step."""
        return self.granularity != "batch"

    @property
    def learns(self) -> bool:
        """Whether anybody wants to know the paths of sequences."""
        return self.groups or self.admit_window > 1

    def check(self) -> None:
        """Raise OptionError for values out of range."""
        check_granularity(self.granularity)
        ranges = {
            "quantum": (1, 1024),
            "timeout_ms": (1, 60_000),
            "ageing": (0, 1_000_000),
            "min_batch": (1, 1024),
            "admit_window": (1, 256),
        }
        for name, (low, high) in ranges.items():
            if not low <= (value := getattr(self, name)) <= high:  # NaN too
                raise OptionError(f"{name} is {value}; it goes from {low} to {high}")


@dataclass
class RegroupingCounts:
    """Totals since the start: steps with decoding sequences, those of them that left somebody out, sequences left out
    (each step anew), taken in by the timeout, groups begun, requests that were overtaken, and seconds of deciding."""

    steps: int = 0
    split: int = 0
    left_out: int = 0
    forced: int = 0
    groups: int = 0
    overtaken: int = 0
    seconds: float = 0.0


class Regrouper:
    """Knows sequences by their slots: when each had its last token, and what it is likely to need."""

    def __init__(self, options: RegroupingOptions, paths: Paths, capacity: int) -> None:
        """For a cache of `capacity` experts of all layers."""
        options.check()
        self.options, self.paths, self.counts = options, paths, RegroupingCounts()
        slots = len(paths.likely)
        self._capacity, self._step = capacity, 0
        self._last = np.full(slots, -1, np.int64)  # step of the last token; -1: it is new
        self._since = np.full(slots, np.nan)  # left out since
        self._group: list[int] = []
        self._left = 0
        self._overtaken: dict[int, int] = {}

    def begin(self, slot: int, source: int, length: int) -> None:
        """See Paths.begin."""
        self.end(slot)
        self.paths.begin(slot, source, length)

    def end(self, slot: int) -> None:
        """The sequence in `slot` has ended, or is about to begin."""
        self._last[slot], self._since[slot] = -1, np.nan
        if slot in self._group:
            self._group.remove(slot)

    def choose(self, slots: Sequence[int], now: float) -> list[int]:
        """Who of the decoding sequences takes part in the next step, in the order in which they were given."""
        if not slots:
            return []
        self._step += 1
        self.counts.steps += 1
        for slot in slots:
            if self._last[slot] < 0:
                self._last[slot] = self._step - 1
        chosen = set(self._pick_group(slots, now) if self.options.groups and len(slots) > FEW else slots)
        for slot in slots:
            if slot in chosen:
                self._last[slot], self._since[slot] = self._step, np.nan
            elif np.isnan(self._since[slot]):
                self._since[slot] = now
        self.counts.left_out += len(slots) - len(chosen)
        self.counts.split += len(chosen) < len(slots)
        return [slot for slot in slots if slot in chosen]

    def admit(self, requests: Sequence[int], likenesses: Sequence[int | None], running: Sequence[int]) -> int:
        """Which of the first waiting requests, by their numbers in order of arrival, is admitted next: its place.

        `likenesses` are slots whose paths they will probably take; whose path nobody knows neither overtakes nor is
        overtaken. Nobody is overtaken more than `admit_window` - 1 times.
        """
        alike: list[int] = []
        for number, slot in zip(requests, likenesses, strict=True):
            if slot is None:
                break
            alike.append(slot)
            if self._overtaken.get(number, 0) >= self.options.admit_window - 1:
                break
        if not running or len(alike) < 2:
            return 0
        likely = self.paths.likely
        chosen = int(np.argmin(likely[alike] @ chance_of_none(likely[list(running)])))
        for number in requests[:chosen]:
            self._overtaken[number] = self._overtaken.get(number, 0) + 1
        self.counts.overtaken += chosen
        return chosen

    def forget(self, request: int) -> None:
        """It waits no more."""
        self._overtaken.pop(request, None)

    def _pick_group(self, slots: Sequence[int], now: float) -> list[int]:
        waited = np.nan_to_num(now - self._since[list(slots)])
        late = [slot for slot, seconds in zip(slots, waited, strict=True) if 1e3 * seconds > self.options.timeout_ms]
        if self.options.granularity == "token":
            self.counts.forced += len(late)
            return self._grow(slots, waited, late or [self._longest_waiting(slots)])
        self._group = [slot for slot in self._group if slot in slots]
        if not self._group or self._left <= 0:
            self._group = self._grow(slots, waited, late or [self._longest_waiting(slots)])
            self._left = self.options.quantum
            self.counts.groups += 1
        self._left -= 1
        outsiders = [slot for slot in late if slot not in self._group]
        self.counts.forced += len(late)
        members = self._group + outsiders
        return members if len(members) >= self.options.min_batch else self._grow(slots, waited, members)

    def _longest_waiting(self, slots: Sequence[int]) -> int:
        return min(slots, key=lambda slot: self._last[slot])

    def _grow(self, slots: Sequence[int], waited: Scores, members: Sequence[int]) -> list[int]:
        """`members` and whoever fits the cache beside them: at least `min_batch`."""
        first = [slots.index(slot) for slot in members]
        group = grow_group(self.paths.likely[list(slots)], waited, first, self._capacity, self.options)
        return [slots[place] for place in group]


def grow_group(
    likely: Chances, waited: Scores, first: Sequence[int], capacity: int, options: RegroupingOptions
) -> list[int]:
    """A group of sequences, [sequences, experts] and seconds [sequences] they have waited, that holds those in `first`.

    One after the other joins, whoever needs the fewest experts more, less `ageing` for the time it has waited, as long
    as the group is expected to need no more experts than fit the cache; and in any case until it has `min_batch`.
    """
    group = list(first)
    free = np.ones(len(likely), np.bool_)
    free[group] = False
    none = chance_of_none(likely[group])
    while free.any():
        more, room = likely @ none, max(capacity - distinct_experts(none), 0.0)
        fits = free & (more <= room + NOTHING)
        can = fits if len(group) >= options.min_batch else free
        if not can.any():
            break
        joins = int(np.argmin(np.where(can, more - options.ageing * waited, np.inf)))
        group.append(joins)
        free[joins] = False
        none *= 1 - likely[joins]
    return group
