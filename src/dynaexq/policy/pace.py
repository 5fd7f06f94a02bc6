"""How fast background copies may go: calm, open after a shift, and braked by the slowdown of decode steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isfinite
from statistics import median

from dynaexq.core import OptionError

LINK_SHARE = 0.8
"""Of the link that copies may take at most: the rest is slack for everything else."""

LEAST_SHARE = 0.02
"""Of the link that copies may take at least, however much they slow decode steps down."""

BACKLOG_SECONDS = 1.0
"""Copies that would take longer than this at the calm rate are a backlog."""

TICK_SECONDS = 0.25
CUT, RAISE = 0.5, 1.1
"""What a tick does to the share: decode steps too slow, and not."""

STEPS = 128
"""Last decode steps of like token counts that are compared, so that both kinds are of the same time."""

FEWEST = 12
"""Decode steps of a kind, with copies and without, that make a median."""


@dataclass(frozen=True)
class PaceOptions:
    """How copies share the link.

    Args:
        calm_share: of the link that copies may take in the steady state.
        shift_seconds: how long after a shift of the workload they may take all that background copies ever may.
        tpot_headroom: how much slower a decode step may get by copies, as a share of its time without.
    """

    calm_share: float = 0.2
    shift_seconds: float = 10.0
    tpot_headroom: float = 0.05

    def check(self) -> None:
        """Raise OptionError for values out of range."""
        if not LEAST_SHARE <= self.calm_share <= LINK_SHARE:
            raise OptionError(f"the calm share {self.calm_share} is not in {LEAST_SHARE}..{LINK_SHARE}")
        if not 0 <= self.shift_seconds < float("inf"):
            raise OptionError(f"shift_seconds {self.shift_seconds} is not a number from 0 up")
        if not 0 < self.tpot_headroom < float("inf"):
            raise OptionError(f"the TPOT headroom {self.tpot_headroom} is not a number above 0")


class Pace:
    """Bytes per second for background copies, between LEAST_SHARE and LINK_SHARE of the link.

    What else uses the link is not known; what shows is how much longer decode steps take while copies run. More than
    the headroom halves the share; else it recovers slowly. All calls come from one thread.
    """

    def __init__(self, options: PaceOptions, link: float) -> None:
        """`link`: measured bytes per second."""
        options.check()
        assert 0 < link < float("inf")
        self.options, self.link = options, link
        self._steps: dict[int, deque[tuple[float, bool]]] = {}  # by bit length of tokens: seconds, copies moving
        self._bound, self._share = LINK_SHARE, options.calm_share
        self._open_until: float | None = None
        self._starting, self._backlog = True, False
        self._ticked: float | None = None

    def note_window(self, seconds: float, tokens: int, moving: bool) -> None:
        """Take in a decode step of `tokens` tokens (not of a prefill); `moving`: copies ran meanwhile."""
        assert 0 < seconds < float("inf")
        assert tokens > 0
        self._steps.setdefault(tokens.bit_length(), deque(maxlen=STEPS)).append((seconds, moving))

    def note_shift(self, now: float) -> None:
        """The workload has shifted at `now` (seconds): what is wanted now is worth more of the link."""
        assert isfinite(now)
        self._open_until = now + self.options.shift_seconds

    def rate(self, now: float, pending_bytes: float) -> float:
        """Bytes per second that copies may take from `now` (seconds) on, with so many bytes waiting to be copied."""
        assert isfinite(now)
        assert 0 <= pending_bytes < float("inf")
        self._tick(now)
        wanted = LINK_SHARE if self._is_open(now, pending_bytes) else self.options.calm_share
        self._share = min(wanted, self._bound)
        return self._share * self.link

    @property
    def slowdown(self) -> float | None:
        """By what share decode steps are slower with copies than without, medians compared; None: not known."""
        total, weights = 0.0, 0
        for steps in self._steps.values():
            busy = [seconds for seconds, moving in steps if moving]
            if min(len(busy), len(steps) - len(busy)) >= FEWEST:
                still = median(seconds for seconds, moving in steps if not moving)
                total += len(busy) * (median(busy) / still - 1)
                weights += len(busy)
        return total / weights if weights else None

    @property
    def share(self) -> float:
        """Of the link that was last given."""
        return self._share

    def _is_open(self, now: float, pending_bytes: float) -> bool:
        """After a shift, and until the first backlog since start is worked off."""
        backlog = pending_bytes > BACKLOG_SECONDS * self.options.calm_share * self.link
        self._starting &= backlog or not self._backlog
        self._backlog |= backlog
        return (self._starting and backlog) or (self._open_until is not None and now < self._open_until)

    def _tick(self, now: float) -> None:
        """Brake or let go, once for all ticks since the last time."""
        ticks = 0 if self._ticked is None else int((now - self._ticked) / TICK_SECONDS)
        if self._ticked is None or ticks > 0:
            self._ticked = now
        if ticks < 1:
            return
        slowdown = self.slowdown
        if slowdown is not None and slowdown > self.options.tpot_headroom:
            self._bound = max(LEAST_SHARE, CUT * min(self._bound, self._share))
            self._forget_moving()
        else:
            self._bound = min(LINK_SHARE, self._bound * RAISE ** min(ticks, 100))

    def _forget_moving(self) -> None:
        """Steps beside copies at the old rate say nothing about the new one."""
        for size, steps in self._steps.items():
            self._steps[size] = deque((step for step in steps if not step[1]), maxlen=STEPS)
