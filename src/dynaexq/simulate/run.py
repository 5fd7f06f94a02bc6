"""The event loop: passes, copies and updates in the order of virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from dynaexq.control import ControlLoop
from dynaexq.device.virtual import VirtualClock, VirtualLink, VirtualWake
from dynaexq.policy.hotness import Scores
from dynaexq.residency.versions import Levels
from dynaexq.simulate.cache import VirtualCache
from dynaexq.simulate.costs import StepCosts
from dynaexq.simulate.feed import Block, Integers
from dynaexq.simulate.journal import Journal, Passes
from dynaexq.simulate.traffic import SimulatedTraffic, TierTally
from dynaexq.traffic.recorder import Step

CHUNK = 128
"""Passes of one token that are looked at together."""


class Moving(NamedTuple):
    """What moves versions in a simulated run."""

    control: ControlLoop
    link: VirtualLink
    wake: VirtualWake
    traffic: SimulatedTraffic


class Simulation:
    """One run. Passes follow each other; with `gaps` none starts before it did when it was recorded."""

    def __init__(
        self,
        clock: VirtualClock,
        sizes: Mapping[str, int],
        levels: Levels,
        costs: StepCosts,
        moving: Moving | None = None,
        gaps: bool = False,
        losses: Scores | None = None,
        drag: float = 0.0,
        cache: VirtualCache | None = None,
    ) -> None:
        """Put everything in its place.

        `sizes`: bytes of a version, by tier from the highest down; `levels`: [layers, experts] to begin with, for
        good without `moving`; `losses`: what a selection loses, in nats of KL, [tiers, layers, experts];
        `drag`: seconds by which a second of copies beside it makes a pass longer; `cache`: which experts are resident,
        where not all are.
        """
        self.tiers = list(sizes)
        self.journal = Journal()
        self._clock, self._sizes, self._costs = clock, np.array([*sizes.values()], np.float64), costs
        self._moving, self._gaps, self._drag, self._cache = moving, gaps, drag, cache
        self._losses = None if losses is None else losses.reshape(len(sizes), -1)
        self._background = moving is not None and moving.control.options.drive == "thread"
        first = np.zeros_like(levels)
        self._tally, self._levels = TierTally(len(sizes), first), first.ravel().astype(np.int64)
        self._bytes_of, self._raised_of = (
            np.full(levels.size, self._sizes[0]),
            np.full(levels.size, float(len(sizes) > 1)),
        )
        self._loss_of = None if self._losses is None else self._losses[0].copy()
        self._epoch = -1
        self._see(levels)

    def run(self, blocks: Iterable[Block], progress: Callable[[int], None]) -> None:
        """Everything in `blocks`; `progress(tokens)` after each."""
        for block in blocks:
            self._run_block(block)
            progress(len(block.places))
        if self._moving is not None:
            self._moving.control.close()

    @property
    def seconds(self) -> float:
        """How long the run has taken."""
        return self._clock.now

    @property
    def cache(self) -> VirtualCache | None:
        """Which experts are resident, where not all are."""
        return self._cache

    @property
    def expert_bytes(self) -> int:
        """Bytes of expert memory."""
        if self._cache:
            return self._cache.expert_bytes
        return self._moving.control.experts.expert_bytes if self._moving else int(self._bytes_of.sum())

    def by_tier(self) -> Scores:
        """Router selections at each tier since the last call, [tiers]."""
        found: Scores = self._tally.take().sum(1)
        return found

    def _run_block(self, block: Block) -> None:
        ends, first = np.empty(len(block.ends)), 0
        while first < len(block.ends):
            done = self._run_calm(block, first, ends) if self._calm else 0
            if self._cache:
                ends[first], done = self._run_cached(self._cache, block, first), 1
            elif not done:
                ends[first], done = self._run_one(block, first), 1
            first += done
        self.journal.note_block(block, ends)

    @property
    def _calm(self) -> bool:
        """Nothing moves, and nothing will before the next update."""
        if self._moving is None:
            return self._cache is None
        control = self._moving.control
        return self._background and control.ticks > 0 and control.pipeline.idle

    def _run_calm(self, block: Block, first: int, ends: Scores) -> int:
        """Passes of one kind that end before the next update; returns how many."""
        horizon = self._clock.now + self._moving.control.seconds_until_due() if self._moving else np.inf
        if block.tokens[first] == 1:
            return self._run_singles(block, first, ends, horizon)
        return self._run_batches(block, first, ends, horizon)

    def _run_singles(self, block: Block, first: int, ends: Scores, horizon: float) -> int:
        """Passes of one token each, all at once."""
        alike = block.prefill[first : first + CHUNK] == block.prefill[first]
        alike &= block.tokens[first : first + CHUNK] == 1
        count = len(alike) if alike.all() else int(alike.argmin())
        rows = slice(int(block.ends[first]) - 1, int(block.ends[first]) - 1 + count)
        prefill = bool(block.prefill[first])
        nbytes = self._bytes_of[block.places[rows]].sum(1)
        seconds = self._costs.line(prefill).seconds(1, nbytes)
        ended = self._when(block, slice(first, first + count), seconds)
        done = int(np.searchsorted(ended, horizon, side="right"))
        if done:
            rows = slice(rows.start, rows.start + done)
            ends[first : first + done] = ended[:done]
            self._clock.reach(float(ended[done - 1]))
            steps = [] if prefill or not self._moving else [Step(each, 1, False) for each in seconds[:done].tolist()]
            passes = Passes(done, prefill, done, float(seconds[:done].sum()), float(nbytes[:done].sum()))
            self._note(block, rows, block.selections(rows, self._levels.size), passes, steps)
        return done

    def _run_batches(self, block: Block, first: int, ends: Scores, horizon: float) -> int:
        """Passes of one kind and of several tokens, one by one, as long as they end before anything happens."""
        prefill, begin = bool(block.prefill[first]), block.rows(first).start
        counts, steps, read, done = np.zeros(self._levels.size, np.int64), [], 0.0, 0
        for place in range(first, min(len(block.ends), first + CHUNK)):
            if block.tokens[place] == 1 or block.prefill[place] != prefill:
                break
            rows = block.rows(place)
            own = block.selections(rows, self._levels.size)
            nbytes = self._read(own)
            seconds = float(self._costs.line(prefill).seconds(rows.stop - rows.start, nbytes))
            end = self._start(block, place) + seconds
            if end > horizon:
                break
            ends[place] = end
            self._clock.reach(end)
            counts += own
            steps.append(Step(seconds, rows.stop - rows.start, False))
            read += nbytes
            done += 1
        if done:
            rows = slice(begin, int(block.ends[first + done - 1]))
            passes = Passes(done, prefill, rows.stop - begin, sum(step.seconds for step in steps), read)
            self._note(block, rows, counts, passes, [] if prefill else steps)
        return done

    def _run_cached(self, cache: VirtualCache, block: Block, place: int) -> float:
        """A pass that waits for experts which are not resident."""
        prefill, asked, start = (
            bool(block.prefill[place]),
            block.asked(place, self._levels.size),
            self._start(block, place),
        )
        nbytes = self._read(asked.counts)
        end = cache.run(asked, start, float(self._costs.line(prefill).seconds(asked.tokens, nbytes)))
        self._clock.reach(end)
        self._note(block, block.rows(place), asked.counts, Passes(1, prefill, asked.tokens, end - start, nbytes), [])
        return end

    def _run_one(self, block: Block, place: int) -> float:
        """A pass beside which things happen: its window pins versions as those of the engine do."""
        moving = self._moving
        assert moving is not None
        control, clock = moving.control, self._clock
        clock.reach(self._start(block, place))
        control.before_window()
        self._look()
        window, _ = control.experts.handles.pin()
        prefill, rows = bool(block.prefill[place]), block.rows(place)
        counts = block.selections(rows, self._levels.size)
        nbytes = self._read(counts)
        seconds = float(self._costs.line(prefill).seconds(rows.stop - rows.start, nbytes))
        start = clock.now
        end = start + seconds
        if self._background:
            self._turn_until(end, moving)
            clock.reach(end)
            end += self._drag * moving.link.busy_since(start)
            self._turn_until(end, moving)
        clock.reach(end)
        control.experts.handles.release(window)
        step = Step(end - start, rows.stop - rows.start, bool(control.pipeline.moving))
        passes = Passes(1, prefill, step.tokens, step.seconds, nbytes)
        self._note(block, rows, counts, passes, [] if prefill else [step])
        if self._background and moving.wake.woken:
            moving.wake.clear()
            control.turn(end)
        self._look()
        return end

    def _turn_until(self, end: float, moving: Moving) -> None:
        """Updates and copies that fall into a pass."""
        while True:
            due = self._clock.now + moving.control.seconds_until_due()
            event = min(due, moving.link.next_end)
            if event >= end:
                return
            self._clock.reach(event)
            moving.control.turn(self._clock.now)

    def _start(self, block: Block, place: int) -> float:
        return max(self._clock.now, float(block.started[place])) if self._gaps else self._clock.now

    def _when(self, block: Block, part: slice, seconds: Scores) -> Scores:
        """When passes end that start one after the other."""
        total = np.cumsum(seconds)
        if not self._gaps:
            return self._clock.now + total
        before = total - seconds
        slack = np.maximum.accumulate(np.maximum(block.started[part], self._clock.now) - before)
        return slack + total

    def _look(self) -> None:
        """See where experts are now."""
        assert self._moving is not None
        experts = self._moving.control.experts
        if experts.epoch != self._epoch:
            self._epoch = experts.epoch
            self._see(experts.levels())

    def _see(self, levels: Levels) -> None:
        now = levels.ravel().astype(np.int64)
        places = np.flatnonzero(now != self._levels)
        moved, self._levels = now[places], now
        self._bytes_of[places] = self._sizes[moved]
        self._raised_of[places] = moved < len(self.tiers) - 1
        if self._losses is not None and self._loss_of is not None:
            self._loss_of[places] = self._losses[moved, places]
        self._tally.move(places, moved)
        if self._moving is not None:
            self._moving.traffic.move(places, moved)

    def _read(self, counts: Integers) -> float:
        """Bytes of the distinct experts among those selected."""
        return float(self._bytes_of @ (counts > 0))

    def _note(self, block: Block, rows: slice, counts: Integers, passes: Passes, steps: list[Step]) -> None:
        """Enter passes that have just ended; `steps` are those that decode."""
        selected = counts.astype(np.float64)
        self._tally.add(selected)
        loss = 0.0 if self._loss_of is None else float(selected @ self._loss_of)
        raised, routed = float(selected @ self._raised_of), float(passes.tokens * block.places.shape[1])
        self.journal.note_passes(self._clock.now, passes, raised, routed, loss)
        if self._moving is not None:
            if block.mass is not None:
                places, mass = block.places[rows].ravel(), block.mass[rows].ravel()
                selected = np.bincount(places, mass, minlength=self._levels.size).astype(np.float64)
            self._moving.traffic.note(selected, passes.prefill, passes.passes, steps)
            self._moving.control.pass_windows(passes.passes, self._levels)
            self.journal.note_shifts(self._clock.now, self._moving.control.signals.shifts)
