"""The transition pipeline: wanted levels become copies, publishes and reclaims, never making anyone wait.

Each `step` does what can be done now: reclaim, take in finished copies, admit new ones. Time is an argument.
(dynaexq paper, section 3.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dynaexq.core import ExpertKey, OptionError, Residency
from dynaexq.device.copies import CopyEngine
from dynaexq.residency.arena import VersionSource
from dynaexq.residency.resizing import PoolBorder
from dynaexq.residency.versions import Levels, VersionedExperts

RESTING = (Residency.RESIDENT_HI, Residency.RESIDENT_LO)
FIRST_BACKOFF, LAST_BACKOFF = 0.5, 60.0
NO_RETRY = (0.0, FIRST_BACKOFF)


@dataclass
class Counters:
    """What happened to expert versions since start."""

    waits: int = 0
    wait_seconds: float = 0.0
    promotions: int = 0
    demotions: int = 0
    evictions: int = 0
    deferred: int = 0
    failed: int = 0
    bytes_moved: int = 0


@dataclass(frozen=True)
class RateLimit:
    """Bounds on background traffic: bytes per second (None: no bound) and copies in flight."""

    bytes_per_second: float | None = None
    in_flight: int = 4

    def check(self) -> None:
        """Raise OptionError for values that would stop all traffic."""
        if self.in_flight < 1:
            raise OptionError(f"in_flight {self.in_flight}: no version could ever move; need at least 1")
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise OptionError(f"a rate of {self.bytes_per_second:g} bytes per second: no version could ever move")


class LinkUse(NamedTuple):
    """Bytes per second that background copies may take (None: no bound), and seconds that copies took so far."""

    limit: float | None
    busy_seconds: float


class TransitionPipeline:
    """Moves experts toward wanted levels. Every method is called by the control thread."""

    def __init__(
        self,
        experts: VersionedExperts,
        source: VersionSource,
        border: PoolBorder,
        engine: CopyEngine,
        limit: RateLimit,
        report_failure: Callable[[str], None],
    ) -> None:
        limit.check()
        self.counters = Counters()
        self.border = border
        self.promotions_by_layer, self.demotions_by_layer = (np.zeros(experts.shape.layers, np.int64) for _ in range(2))
        self._experts = experts
        self._source = source
        self._engine = engine
        self._limit = limit
        self._report_failure = report_failure
        self._wanted = experts.levels()
        self._promotions: list[list[int]] = [[] for _ in experts.pools]  # by level: experts, see ModelShape.index
        self._demotions: list[list[int]] = [[] for _ in experts.pools]
        self._in_flight: dict[int, ExpertKey] = {}
        self._deferred: set[ExpertKey] = set()
        self._retry: dict[ExpertKey, tuple[float, float]] = {}  # not before, next back-off
        self._next_ticket = 0
        self._paid_until = self._stepped = 0.0

    def want(self, wanted: Levels, gains: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Replace the update queue by what `wanted` [layers, experts] asks for, highest gain in and lowest out first.

        A transfer in flight counts as done; one that turns out unwanted is queued to be taken back.
        """
        current = self.pending_levels
        self._wanted = wanted
        for level in range(len(self._experts.pools)):
            self._promotions[level] = _line_up((wanted == level) & (current > level), -gains)
            self._demotions[level] = _line_up((wanted == level) & (current < level), gains)

    @property
    def idle(self) -> bool:
        """Nothing queued, moving, or waiting to be reclaimed."""
        return not (self._queued or self._in_flight or self._experts.retired)

    @property
    def busy(self) -> bool:
        """Something is moving or waiting to be reclaimed, so that a later step will have more to do."""
        return bool(self._in_flight or self._experts.retired)

    @property
    def reclaiming(self) -> bool:
        """A block waits for the windows that can still read it."""
        return bool(self._experts.retired)

    @property
    def pending_levels(self) -> Levels:
        """Levels in force or on their way, [layers, experts]: what a policy compares with."""
        levels = self._experts.levels()
        for key in self._in_flight.values():
            filling = self._experts.entries[key].filling
            assert filling is not None
            levels[key] = filling.level
        return levels

    @property
    def moving(self) -> list[ExpertKey]:
        """Experts with a version on its way. This and the next may be read by any thread."""
        return list(self._in_flight.values())

    @property
    def waiting_blocks(self) -> int:
        """Blocks that wait for windows which can still read them."""
        return len(self._experts.retired)

    def problems(self) -> list[str]:
        """What keeps versions from moving, for people."""
        problems = []
        if missing := self._source.missing_files():
            problems.append(f"{len(missing)} files of expert versions are gone or replaced, such as {missing[0]}")
        if failing := list(self._retry):
            problems.append(f"{len(failing)} experts could not be moved when last tried; they stay as they are")
        return problems

    @property
    def link(self) -> LinkUse:
        """How busy the way into the arena has been."""
        return LinkUse(self._limit.bytes_per_second, self._engine.busy_seconds)

    @property
    def queued_bytes(self) -> int:
        """Bytes that are still to be copied for what is wanted."""
        sizes, keep = self._experts.plan.sizes, self._experts.keep_low
        pairs = zip(sizes, self._promotions, self._demotions, strict=True)
        return sum(size * (len(up) + (0 if keep else len(down))) for size, up, down in pairs)

    def set_rate(self, bytes_per_second: float) -> None:
        """Bound copies that start from now on."""
        self._limit = replace(self._limit, bytes_per_second=bytes_per_second)

    def next_try(self) -> float | None:
        """When a transition can start that the last step held back for rate or back-off; None: none was held back."""
        if len(self._in_flight) >= self._limit.in_flight:
            return None
        if not self._queued:
            return None
        if self._paid_until > self._stepped:
            return self._paid_until
        return min((when for when, _ in self._retry.values() if when > self._stepped), default=None)

    def close(self) -> None:
        """Let the running copy end and start no other."""
        self._engine.close()

    def step(self, now: float) -> None:
        """Do what can be done at time `now` (seconds)."""
        self._stepped = now
        self._take_completions(now)
        self.counters.evictions += self._experts.reclaim()
        self.border.step()
        self._admit(now)
        if self._queued and not (self.busy or self._experts.keep_low or now < self._paid_until):
            self._make_way(now)

    @property
    def _queued(self) -> bool:
        return any(self._promotions) or any(self._demotions)

    def _take_completions(self, now: float) -> None:
        for ticket, error in self._engine.completed():
            key = self._in_flight.pop(ticket)
            entry = self._experts.entries[key]
            assert entry.filling is not None
            level, promoting = entry.filling.level, entry.state is Residency.PROMOTING
            if error is not None:
                self._experts.abandon(key)
                self._fail(key, error, now, level)
                continue
            self._retry.pop(key, None)
            self._experts.finish(key)
            self.counters.bytes_moved += self._experts.layouts[level].extent_bytes
            self._count(key, promoting)

    def _admit(self, now: float) -> None:
        """Demotions first: their blocks make promotions feasible."""
        for level, queue in enumerate(self._demotions):
            if not queue:
                continue
            if self._experts.keep_low:
                self._demotions[level] = [number for number in queue if not self._drop(self._key(number))]
            else:
                self._demotions[level] = self._start_some(queue, level, now)
        for level, queue in enumerate(self._promotions):
            if queue:
                self._promotions[level] = self._start_some(queue, level, now)

    def _make_way(self, now: float) -> None:
        """Where everyone waits for another one's block, move one of them aside; its own wish stays in the queue.

        Who is not tried again yet counts as content: else others would make way for it in vain.
        """
        wanted, current = self._wanted.copy(), self._experts.levels()
        for key, (when, _) in self._retry.items():
            if now < when:
                wanted[key] = current[key]
        if (detour := self._experts.find_detour(wanted)) is not None:
            key, level = detour
            offset = self._experts.try_begin(key, level)
            assert offset is not None
            self._submit(key, level, offset, now)

    def _key(self, number: int) -> ExpertKey:
        return ExpertKey(*divmod(number, self._experts.shape.experts))

    def _start_some(self, queue: list[int], level: int, now: float) -> list[int]:
        """Start what limits and free blocks allow, from the head of the line; returns what is left of it."""
        left: list[int] = []
        for place, number in enumerate(queue):
            if now < self._paid_until or len(self._in_flight) >= self._limit.in_flight:
                return left + queue[place:]
            key = self._key(number)
            entry = self._experts.entries[key]
            if entry.state in RESTING and entry.level == level:
                continue
            if entry.state in RESTING and now >= self._retry.get(key, NO_RETRY)[0]:
                offset = self._experts.try_begin(key, level)
                if offset is None:
                    self.counters.deferred += key not in self._deferred
                    self._deferred.add(key)
                    return left + queue[place:]
                self._submit(key, level, offset, now)
                continue
            left.append(number)
        return left

    def _drop(self, key: ExpertKey) -> bool:
        """Demote where the low version is resident; True when the queue is done with it."""
        state = self._experts.entries[key].state
        if state is Residency.RESIDENT_HI:
            self._experts.drop_high(key)
            self._count(key, promoted=False)
        return state in RESTING

    def _count(self, key: ExpertKey, promoted: bool) -> None:
        self.counters.promotions += promoted
        self.counters.demotions += not promoted
        (self.promotions_by_layer if promoted else self.demotions_by_layer)[key.layer] += 1

    def _submit(self, key: ExpertKey, level: int, offset: int, now: float) -> None:
        destination = self._experts.destination(level, offset)
        tier, source = self._experts.tiers[level], self._source
        if self._limit.bytes_per_second is not None:
            self._paid_until = max(now, self._paid_until) + destination.nbytes / self._limit.bytes_per_second
        self._deferred.discard(key)
        self._in_flight[self._next_ticket] = key
        self._engine.submit(self._next_ticket, destination.nbytes, lambda: source.read_into(key, tier, destination))
        self._next_ticket += 1

    def _fail(self, key: ExpertKey, error: Exception, now: float, level: int) -> None:
        self.counters.failed += 1
        backoff = self._retry.get(key, NO_RETRY)[1]
        self._retry[key] = now + backoff, min(2 * backoff, LAST_BACKOFF)
        if self._wanted[key] == level:
            queues = self._promotions if level < self._experts.entries[key].level else self._demotions
            queues[level].append(self._experts.shape.index(key))
        expert = f"expert {key.expert} of MoE layer {key.layer}"
        self._report_failure(f"{expert}: {error}; its version in force stays, next try in {backoff:g} s")


def _line_up(mask: np.ndarray[Any, np.dtype[np.bool_]], order: np.ndarray[Any, np.dtype[np.float64]]) -> list[int]:
    """Numbers of the experts in `mask` [layers, experts], lowest `order` first."""
    found = np.flatnonzero(mask)
    ranked: list[int] = found[np.argsort(order.ravel()[found], kind="stable")].tolist()
    return ranked
