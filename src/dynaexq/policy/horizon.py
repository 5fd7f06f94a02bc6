"""How far ahead experts are read: far enough that they are there in time, no further than predictions are worth it."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from dynaexq.policy.trial import Trial

PERIOD = 96
"""Layers after which the horizon is looked at."""

KEPT = 0.9
"""Of a period's layers, whose times count in trials: the longest may be those of a prompt."""

WAITED, WASTED = 0.05, 0.4
"""Share of time that waits may take before the horizon grows, and of reads that may be in vain before it shrinks."""


def lead_steps(load_seconds: float, step_seconds: float, loads: float = 1.0) -> int:
    """Steps (layers, or tokens) before its use that reading must begin: S0 = ceil(N_e E_s / (C_s T_l)), where
    `loads` N_e experts of a step are read, E_s / C_s = `load_seconds` each (arXiv 2510.26730)."""
    assert step_seconds > 0
    return max(1, math.ceil(loads * load_seconds / step_seconds))


class ReadSums(NamedTuple):
    """Reads that ended, their seconds, and experts that were read ahead and given up unused."""

    loads: int
    seconds: float
    wasted: int


class Horizon:
    """Layers ahead. Begins with S0 once a period is over, then goes by one where two periods agree; see trial.py for
    when it is none."""

    def __init__(self, most: int, fixed: int | None = None) -> None:
        """At most `most` layers; `fixed`: always so many."""
        self._reach = 1 if fixed is None else fixed
        self._most, self._fixed = most, fixed
        self._trial, self._spans = Trial(), list[float]()
        self._started, self._last = False, 0
        self._seen = ReadSums(0, 0.0, 0)
        self._clear()

    @property
    def layers(self) -> int:
        """Layers ahead now: none where reading ahead does not pay, or for a period to see whether it does."""
        return self._reach if self._fixed is not None or self._trial.on else 0

    def follow(self, layer: int, computed: float, waited: float, sums: ReadSums) -> None:
        """`layer` begins: see `note` for the layer before it in the pass, where `sums` are those of the whole run."""
        if layer > 0:
            seen = self._seen
            self.note(
                computed,
                waited,
                sums.loads - seen.loads,
                sums.seconds - seen.seconds,
                sums.wasted - seen.wasted,
            )
        self._seen = sums

    def note(self, computed: float, waited: float, loads: int, load_seconds: float, wasted: int) -> None:
        """A layer took so many seconds and waited so long; so many reads, of so many seconds together, ended meanwhile,
        and so many that were made ahead were given up unused."""
        if self._fixed is not None:
            return
        self._spans.append(computed + waited)
        self._computed += computed
        self._waited += waited
        self._loads += loads
        self._load_seconds += load_seconds
        self._wasted += wasted
        self._count += 1
        if self._count < PERIOD:
            return
        if not self._started and self._loads and self._computed:
            each = self._load_seconds / self._loads
            self._reach = min(self._most, lead_steps(each, self._computed / self._count, self._loads / self._count))
            self._started = True
        elif self._trial.on:
            self._adjust()
        self._trial.note(statistics.fmean(sorted(self._spans)[: int(PERIOD * KEPT)]))
        self._clear()

    def _adjust(self) -> None:
        wish = 0
        if self._wasted > WASTED * max(1, self._loads):
            wish = -1
        elif self._waited > WAITED * (self._waited + self._computed):
            wish = 1
        if wish and wish == self._last:
            self._reach = min(self._most, max(1, self._reach + wish))
            wish = 0
        self._last = wish

    def _clear(self) -> None:
        self._computed = self._waited = self._load_seconds = 0.0
        self._loads = self._wasted = self._count = 0
        self._spans.clear()
