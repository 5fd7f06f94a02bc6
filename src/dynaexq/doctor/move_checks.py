"""Checks of servers that move experts between tiers."""

from __future__ import annotations

from dynaexq.doctor.cache_checks import LITTLE_WAITING, MUCH_WAITING
from dynaexq.doctor.figures import Figures
from dynaexq.doctor.server_checks import ENOUGH_HIGH, FEWEST_STEPS
from dynaexq.doctor.verdicts import Status, Verdict, grade_high, grade_low, judge, percent, too_few

FEWEST_MOVES = 50
"""Transitions: the first ones fill free slots, and find a block always."""

FEW_DEFERRED, MANY_DEFERRED = 0.5, 0.9
"""Of transitions that were first in line, those that found no block. One that waits is counted each time that it is
looked at, so that half is common; with nine of ten, exchanges go one by one."""

FEW_BLOCKS, MANY_BLOCKS = 16, 64
"""That wait for windows: the default of spare blocks, beyond which moves stop, and some times that."""

GAIN, NO_GAIN = 2.0, 1.2
"""Odds that traffic is above the lowest tier, over those of experts: at 1, chosen experts are no hotter than others."""


def check_deferred(figures: Figures) -> Verdict:
    """Do transitions find blocks?"""
    if figures.deferred_share is None or (figures.moves or 0) < FEWEST_MOVES:
        return too_few(figures.moves, FEWEST_MOVES, "transitions")
    text = f"{percent(figures.deferred_share)} of transitions first in line found no block"
    return judge(grade_low(figures.deferred_share, FEW_DEFERRED, MANY_DEFERRED), text, "`--tune spare=32` (default 16)")


def check_waits(figures: Figures) -> Verdict:
    """Do passes wait for versions?"""
    if figures.wait_share is None or (figures.steps or 0) < FEWEST_STEPS:
        return too_few(figures.steps, FEWEST_STEPS, "steps")
    text = f"{percent(figures.wait_share)} of the time of steps is waiting for versions"
    advice = "`--mode dynaexq`: it moves them in the background"
    return judge(grade_low(figures.wait_share, LITTLE_WAITING, MUCH_WAITING), text, advice)


def check_reclaim(figures: Figures) -> Verdict:
    """Do blocks come free soon?"""
    if figures.reclaiming is None or (figures.moves or 0) < FEWEST_MOVES:
        return too_few(figures.moves, FEWEST_MOVES, "transitions")
    text = f"{figures.reclaiming:.0f} blocks wait for passes that can still read them"
    advice = "`--step-tokens 64` (default 128): shorter passes let go of blocks sooner"
    return judge(grade_low(figures.reclaiming, FEW_BLOCKS, MANY_BLOCKS), text, advice)


def check_high(figures: Figures) -> Verdict:
    """Do higher tiers go to experts that traffic goes to?"""
    if figures.high_traffic is None or not figures.high_experts or (figures.steps or 0) < FEWEST_STEPS:
        return too_few(figures.steps, FEWEST_STEPS, "steps above the lowest tier")
    traffic, experts = percent(figures.high_traffic), percent(figures.high_experts)
    text = f"{traffic} of traffic and {experts} of experts are above the lowest tier"
    gain = _odds(figures.high_traffic) / _odds(figures.high_experts)
    status = Status.GOOD if figures.high_traffic >= ENOUGH_HIGH else grade_high(gain, GAIN, NO_GAIN)
    return judge(status, text, "`--mode uniform`: traffic is too even for a choice of experts")


def _odds(share: float) -> float:
    return share / max(1 - share, 1e-9)
