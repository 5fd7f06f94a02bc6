"""The control loop: traffic becomes hotness, hotness wanted levels, wanted levels transitions.

Four drives of the same loop: `thread` (the product: a thread of its own, the token path never waits), `replay`
(every so many windows, settled before the next: reproducible, for evaluation), `recorded` (before each window, what an
earlier run had in it), `blocking` (the ablation: transitions on the token path, waits counted). (dynaexq paper,
sections 3 and 4.)
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dynaexq.control_options import ControlOptions
from dynaexq.core import OptionError, StoreError
from dynaexq.orders import Orders
from dynaexq.policy import Hotness
from dynaexq.policy.hotness import Scores
from dynaexq.residency.transitions import TransitionPipeline
from dynaexq.residency.versions import VersionedExperts
from dynaexq.signals import Signals
from dynaexq.steering import Steering
from dynaexq.traffic import Traffic, TrafficRecorder
from dynaexq.traffic.recorder import ClosedWindow, Levels
from dynaexq.traffic.shares import TierShares
from dynaexq.traffic.version_map import MapRecorder, RecordedMap

POLL_SECONDS = 0.005
"""How often reclaiming looks again while windows hold blocks back."""

SAVE_SECONDS = 30.0
"""How much hotness a killed process loses at most."""


class Wake(Protocol):
    """What the loop's thread waits on, such as threading.Event."""

    def set(self) -> None:
        """Something has happened."""

    def clear(self) -> None:
        """Nothing has happened since."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until something happens, `timeout` seconds at most."""


class TrafficSource(Protocol):
    """What windows hand their traffic to, and updates collect it from."""

    def add(self, window: ClosedWindow) -> None:
        """Take one finished window."""

    def collect(self) -> Traffic:
        """Add up and forget what came since the last call."""


@dataclass(frozen=True)
class Extras:
    """What some runs also have.

    Args:
        save: keeps hotness for the next start, as sums [layers, experts] and router selections: at the end, and every
            so often before.
        recorded: says every window's map, in the drive of that name.
        traffic: None for a recorder of router choices.
    """

    save: Callable[[Scores, int], None] | None = None
    recorded: RecordedMap | None = None
    traffic: TrafficSource | None = None


NO_EXTRAS = Extras()


class ControlLoop:
    """Owns the pipeline: all its calls come from one thread, the loop's own or, in replay and blocking, the model's."""

    def __init__(
        self,
        experts: VersionedExperts,
        pipeline: TransitionPipeline,
        steering: Steering,
        options: ControlOptions,
        hotness: Hotness,
        signals: Signals,
        wake: Wake,
        clock: Callable[[], float] = time.monotonic,
        extras: Extras = NO_EXTRAS,
    ) -> None:
        """`wake` ends waits of the loop's thread, `clock` says seconds."""
        options.check()
        assert (extras.recorded is not None) is (options.drive == "recorded")
        self._recorded, self.experts = extras.recorded, experts
        self._record: MapRecorder | None = None
        self.signals = signals
        self.options = options
        self.pipeline = pipeline
        self.recorder = extras.traffic or TrafficRecorder(experts.shape, len(experts.tiers), options.signal)
        self.hotness = hotness
        self.steering = steering
        self.shares = TierShares(np.zeros((len(experts.tiers), experts.shape.layers)))
        self.ticks = 0
        self._orders, self._wake, self._clock = Orders(wake.set), wake, clock
        self._save = extras.save
        self._next_save = clock() + SAVE_SECONDS
        self._saved = 0.0
        self._unsaved: str | None = None
        self._unrecorded: str | None = None
        self._closing = threading.Event()
        self._failure: Exception | None = None
        self._interval = options.first_interval
        self._next_tick: float | None = None
        self._windows = 0
        self._thread: threading.Thread | None = None

    def record_maps(self, record: MapRecorder) -> None:
        """Have `record` hear of every window's map from now on, and close it at the end."""
        self._record = record

    def start(self) -> None:
        """Start the thread, where the drive has one."""
        if self.options.drive == "thread":
            self._thread = threading.Thread(target=self._run, name="dynaexq-control", daemon=True)
            self._thread.start()

    def before_window(self) -> None:
        """Called on the token path as a window opens: waits in the drive `blocking` only."""
        if self._failure is not None:
            raise self._failure
        if self._recorded is not None:
            self._move_to(self._recorded.next())
        if self.options.drive == "blocking" and not self._closing.is_set():
            start = self._clock()
            self.turn(start)
            if self.pipeline.busy:
                self._settle()
                self.pipeline.counters.waits += 1
                self.pipeline.counters.wait_seconds += self._clock() - start

    def after_window(self, window: ClosedWindow) -> None:
        """Called on the token path as a window closes: hands its traffic over."""
        if self._closing.is_set():
            return
        self.recorder.add(window._replace(moving=bool(self.pipeline.moving)))
        self.pass_windows(1, window.levels)

    def pass_windows(self, count: int, levels: Levels) -> None:
        """Their traffic is with the recorder; `levels` [layers * experts] were in force in all of them."""
        self._windows += count
        if self._record is not None:
            self._note(self._record, levels, count)
        if self.options.drive == "recorded":
            self._collect()
        elif self.options.drive == "thread":
            if self._next_tick is None or self.pipeline.busy:  # else the next update comes by itself
                self._wake.set()
        elif self.options.drive == "replay" and self._windows % self.options.every_windows == 0:
            self.update()
            self._settle()

    def steer(self, change: Callable[[Steering], None]) -> None:
        """Have the loop's thread make a change, and wait until it is made (not until versions have moved).

        Raises:
            OptionError: it cannot be had, or this loop has no thread of its own.
        """
        self._order(lambda: change(self.steering))

    def save_hotness(self) -> None:
        """Save what is known by now. Raises OptionError where nothing says where to, StoreError where that fails."""
        if self._save is None:
            raise OptionError("no file to save hotness to was named at the start (--state)")

        def save() -> None:
            self._collect()
            self._save_new_hotness()

        self._order(save)

    def update(self, now: float = 0.0) -> None:
        """One tick: fold traffic in, and renew the wanted levels. Called by the thread that owns the pipeline.

        `now`, in seconds, matters where a pace says how fast versions move.
        """
        self._collect()
        if (rate := self.signals.rate(now, self.pipeline.queued_bytes)) is not None:
            self.pipeline.set_rate(rate)
        scores, shadow = self.hotness.scores, self.signals.shadow
        if shadow:
            shadow.step(scores)
        wanted = self.steering.choose(scores, self.pipeline.pending_levels)
        if shadow:
            shadow.note_wanted(wanted)
        self.pipeline.want(wanted, self.steering.ladder.gains(scores).sum(0))
        self.ticks += 1

    def close(self) -> None:
        """Stop moving versions, add up the last traffic, and save hotness; further calls do nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self.pipeline.close()
        self._collect()
        self._save_hotness()
        if self._record is not None:
            with contextlib.suppress(StoreError):  # a map without an end is none
                self._record.close()

    def problems(self) -> list[str]:
        """What is wrong with moving versions, for people."""
        if self._failure is not None:
            return [f"versions move no more: {self._failure}"]
        own = [problem for problem in (self._unsaved, self._unrecorded) if problem is not None]
        return own if self._closing.is_set() else [*own, *self.pipeline.problems()]

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wake.wait(self._seconds_to_wait())
                self._wake.clear()
                self.turn(self._clock())
        except Exception as error:
            self._failure = error

    def _seconds_to_wait(self) -> float:
        """Until the next update, unless a copy ends, or something may be reclaimed or started, before."""
        waiting = self.seconds_until_due()
        return min(waiting, POLL_SECONDS) if self.pipeline.reclaiming else waiting

    def seconds_until_due(self) -> float:
        """Until the next update, or the next transition that was held back."""
        now = self._clock()
        waiting = self._interval if self._next_tick is None else max(0.0, self._next_tick - now)
        if (start := self.pipeline.next_try()) is not None:
            waiting = min(waiting, max(0.0, start - now))
        return waiting

    def turn(self, now: float) -> None:
        """Move transitions on, and update the wanted set when it is due: first as soon as there is any traffic.

        Called by the loop's thread, or by whoever takes its place.
        """
        self.pipeline.step(now)
        steered = self._orders.take()
        due = self._windows > 0 if self._next_tick is None else now >= self._next_tick
        if due or steered:
            self.update(now)
            self._next_tick = now + self._interval
            self._interval = min(2 * self._interval, self.options.interval)
            self.pipeline.step(now)
        if now >= self._next_save:
            self._save_hotness()
            self._next_save = now + SAVE_SECONDS

    def _order(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread; raises what it raises."""
        if self._thread is None:
            raise OptionError("versions of this run do not move in the background, so there is nothing to steer")
        self._orders.give(action, self._thread)

    def _note(self, record: MapRecorder, levels: Levels, windows: int) -> None:
        """Record the map of windows; a recording with a hole is none, so the first failure ends it."""
        try:
            record.note(levels, windows)
        except StoreError as error:
            self._record, self._unrecorded = None, f"versions are not recorded any more: {error}"
            warnings.warn(self._unrecorded, stacklevel=2)

    def _collect(self) -> None:
        traffic = self.recorder.collect()
        if traffic.windows:
            self.signals.take(traffic, self.hotness)
            self.hotness.update(traffic.prefill, traffic.decode)
            self.shares = TierShares(self.shares.routed + traffic.by_tier)

    def _save_hotness(self) -> None:
        """Save what the last save does not have; what goes wrong is a warning, once, for serving goes on."""
        try:
            self._save_new_hotness()
        except StoreError as error:
            if self._unsaved is None:
                warnings.warn(f"hotness is not kept: {error}", stacklevel=2)
            self._unsaved = f"hotness is not kept: {error}"
        else:
            self._unsaved = None

    def _save_new_hotness(self) -> None:
        routed = float(self.shares.routed.sum())
        if self._save and routed > self._saved:
            self._save(self.hotness.sums, int(routed))
            self._saved = routed

    def _move_to(self, levels: Levels) -> None:
        """Have every expert at its level of `levels` [layers * experts]."""
        wanted = levels.reshape(self.hotness.scores.shape).astype(np.int8)
        self.pipeline.want(wanted, self.hotness.scores)
        self._settle()
        if not np.array_equal(wanted, self.experts.levels()):
            raise StoreError("a version of the recorded map cannot be had: " + "; ".join(self.pipeline.problems()))

    def _settle(self) -> None:
        """Step until nothing moves any more."""
        self.pipeline.step(self._clock())
        while self.pipeline.busy:
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            self.pipeline.step(self._clock())
