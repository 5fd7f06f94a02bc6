"""How often and how the control loop decides (see control.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynaexq.core import OptionError
from dynaexq.policy import HotnessOptions, SelectionOptions
from dynaexq.traffic import check_signal

DRIVES = ("thread", "replay", "recorded", "blocking")


@dataclass(frozen=True)
class ControlOptions:
    """How often and how the wanted set is made.

    Args:
        first_interval, interval: `T_u` in seconds: the first after the first window, doubling up to `interval`.
        keep_at_shift: part of hotness that is kept when the workload has shifted.
        every_windows: for the drive `replay`: windows between two updates.
    """

    drive: str = "thread"
    first_interval: float = 0.05
    interval: float = 1.0
    keep_at_shift: float = 0.1
    every_windows: int = 1
    signal: str = "count"
    hotness: HotnessOptions = field(default_factory=HotnessOptions)
    selection: SelectionOptions = field(default_factory=SelectionOptions)

    def check(self) -> None:
        """Raise OptionError for unknown or impossible values."""
        if self.drive not in DRIVES:
            raise OptionError(f"unknown drive '{self.drive}'; known drives are {', '.join(DRIVES)}")
        if not 0 < self.first_interval <= self.interval:
            pair = f"first_interval {self.first_interval:g} and interval {self.interval:g}"
            raise OptionError(f"{pair}: the first must be above 0, and the second not below it")
        if not 0 <= self.keep_at_shift <= 1:
            raise OptionError(f"keep_at_shift {self.keep_at_shift} is not in 0..1")
        if self.every_windows < 1:
            raise OptionError(f"every_windows {self.every_windows}: need at least 1")
        check_signal(self.signal)
        self.hotness.check()
        self.selection.check()
