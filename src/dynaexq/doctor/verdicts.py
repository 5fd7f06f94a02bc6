"""What a check says."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Status(Enum):
    """How it stands with one thing."""

    GOOD = "good"
    LOOK = "look"
    """Could be better."""
    BAD = "bad"
    UNKNOWN = "unknown"
    """Too little was seen to say."""


ORDER = (Status.GOOD, Status.LOOK, Status.BAD)


class Verdict(NamedTuple):
    """What was found, and the one change that is advised (empty: none)."""

    status: Status
    text: str
    advice: str = ""


def grade_high(value: float, good: float, fair: float) -> Status:
    """Where more is better: good from `good` on, bad below `fair`."""
    return Status.GOOD if value >= good else Status.LOOK if value >= fair else Status.BAD


def grade_low(value: float, good: float, fair: float) -> Status:
    """Where less is better: good up to `good`, bad above `fair`."""
    return Status.GOOD if value <= good else Status.LOOK if value <= fair else Status.BAD


def judge(status: Status, text: str, advice: str) -> Verdict:
    """A verdict; what is good needs no advice."""
    return Verdict(status, text, "" if status is Status.GOOD else advice)


def too_few(seen: float | None, needed: int, what: str) -> Verdict:
    """Not enough to say anything."""
    return Verdict(Status.UNKNOWN, f"{seen or 0:,.0f} {what} seen, at least {needed:,} are needed")


def percent(share: float) -> str:
    """A share, for people."""
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Seconds, for people."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
