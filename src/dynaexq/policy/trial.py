"""Whether reading ahead pays, found out by leaving it out now and then. Pure.

Reads ahead cost what they take from computing: cores and memory bandwidth where a CPU copies, a part of the link where
predictions are wrong. Where waits are short, that can be more than they hide.
"""

from __future__ import annotations

FIRST, MOST = 4, 64
"""Periods before the first trial, and between trials at most; twice as many whenever one confirms what is done."""

GAIN = 0.03
"""Part of a layer's time by which the other way must be better, so that trials do not follow noise."""

AGREE = 2
"""Trials in a row that must say so."""


class Trial:
    """Which of two ways is faster: one is used, the other tried for a period now and then."""

    def __init__(self) -> None:
        self._chosen, self._trying = True, False
        self._gap = self._left = FIRST
        self._usual: float | None = None
        self._against = 0

    @property
    def on(self) -> bool:
        """Whether the first way goes for the period that runs."""
        return self._chosen is not self._trying

    def note(self, seconds: float) -> None:
        """A period has ended, in which a layer took so long."""
        if self._trying:
            self._judge(seconds)
            return
        self._usual = seconds if self._usual is None else (self._usual + seconds) / 2
        self._left -= 1
        self._trying = self._left <= 0

    def _judge(self, seconds: float) -> None:
        assert self._usual is not None
        self._trying = False
        if seconds >= (1 - GAIN) * self._usual:
            self._against = 0
            self._gap = self._left = min(2 * self._gap, MOST)
            return
        self._against += 1
        self._left = 1
        if self._against == AGREE:
            self._chosen, self._usual, self._against = not self._chosen, seconds, 0
            self._gap = self._left = FIRST
