"""Checks of servers that hold some experts and read the others: predictions, hits, reads, and the link."""

from __future__ import annotations

import math

from dynaexq.doctor.advice import fewer_bytes, further_ahead, less_picky, more_at_once, more_memory, pickier
from dynaexq.doctor.figures import Figures
from dynaexq.doctor.verdicts import Status, Verdict, duration, grade_high, grade_low, judge, percent, too_few

FEWEST_NEEDS = 1000
"""Of layers for experts: shares of fewer are off by a few points by chance alone, and say how a cache fills."""

FEWEST_LOADS = 100
"""Reads, for their mean and the share of them that is hidden."""

GOOD_RECALL, FAIR_RECALL = 0.8, 0.6
"""Share of needs that are predicted. Of 0.85 and more, half of the experts resident are enough (ExpertFlow, section 2);
below 0.6 there are nearly as many surprises as needs."""

GOOD_HITS, FAIR_HITS = 0.8, 0.5
"""Share of needs met: below, passes wait at nearly every layer on a link that is slower than memory."""

FEW_WASTED, MANY_WASTED = 0.2, 0.4
"""Share of reads ahead that were in vain. From the second on, the horizon shrinks by itself (policy/horizon.py)."""

FEW_LATE, MANY_LATE = 0.05, 0.15
"""Share of needs for experts that were on their way."""

GOOD_HIDDEN, FAIR_HIDDEN = 0.8, 0.5
"""Share of the time of reads: the first is ExpertFlow's aim."""

LITTLE_WAITING, MUCH_WAITING = 0.05, 0.25
"""Share of the time of steps. Below the first, nobody would notice an end to all waits; it is the horizon's, too."""

QUICK, SLOW = 4.0, 16.0
"""Layers that pass while one expert is read: predictions are good for some four, and of hardly any use beyond."""

IDLE_LINK, BUSY_LINK = 0.6, 0.9
"""Seconds of reads over those of steps: above the second, what is read earlier only makes other reads later."""


def check_prediction(figures: Figures) -> Verdict:
    """Are needs foreseen?"""
    if figures.recall is None or (figures.needs or 0) < FEWEST_NEEDS:
        return too_few(figures.needs, FEWEST_NEEDS, "needs of layers")
    advice = "`dynaexq predictor train STORE --traces FILE`, with a trace of `--record-hidden`"
    text = f"{percent(figures.recall)} of needs were predicted, {percent(figures.precision or 0)} of predictions needed"
    return judge(grade_high(figures.recall, GOOD_RECALL, FAIR_RECALL), text, advice)


def check_hits(figures: Figures) -> Verdict:
    """Are the experts that are needed resident?"""
    if figures.hit_rate is None or (figures.needs or 0) < FEWEST_NEEDS:
        return too_few(figures.needs, FEWEST_NEEDS, "needs of layers")
    text = f"{percent(figures.hit_rate)} of needs were met by residents"
    capacity, wanted = figures.capacity or 0, figures.needs_per_step
    if wanted is not None:
        text += f"; a pass needs {wanted:.0f} experts, {capacity:.0f} fit"
    return judge(grade_high(figures.hit_rate, GOOD_HITS, FAIR_HITS), text, _advise_hits(figures))


def _advise_hits(figures: Figures) -> str:
    if (figures.needs_per_step or 0) > (figures.capacity or 0):
        return more_memory(figures)
    if figures.horizon is None:
        return "`--mode lfu`" if figures.subject.mode in ("lru", "two-tier") else "`--mode expertflow`"
    if (figures.recall or 0) < GOOD_RECALL or figures.standing_share:
        return more_memory(figures)
    return "`--tune standing_share=0.2`: who is always needed stays"


def check_hidden(figures: Figures) -> Verdict:
    """Do passes go on while experts are read?"""
    if figures.hidden is None or (figures.loads or 0) < FEWEST_LOADS:
        return too_few(figures.loads, FEWEST_LOADS, "reads")
    waited = figures.wait_share or 0
    text = f"{percent(figures.hidden)} of the time of reads was hidden; {percent(waited)} of steps is waiting"
    if waited <= LITTLE_WAITING:
        return Verdict(Status.GOOD, text)
    return judge(grade_high(figures.hidden, GOOD_HIDDEN, FAIR_HIDDEN), text, _advise_hidden(figures))


def _advise_hidden(figures: Figures) -> str:
    if figures.horizon is None:
        return "`--mode expertflow`: it reads before experts are needed"
    if not figures.horizon or (figures.link_share or 0) > BUSY_LINK:  # a horizon of 0: reading ahead did not pay
        return more_memory(figures)
    if (figures.late_share or 0) > FEW_LATE:
        return further_ahead(figures)
    if (figures.wasted_share or 0) <= FEW_WASTED:
        return less_picky(figures)
    return more_at_once(figures)


def check_late(figures: Figures) -> Verdict:
    """Are experts still on their way when they are needed?"""
    if figures.late_share is None or (figures.needs or 0) < FEWEST_NEEDS:
        return too_few(figures.needs, FEWEST_NEEDS, "needs of layers")
    ahead = f"they are read {figures.horizon or 0:.0f} layers ahead"
    text = f"{percent(figures.late_share)} of needs were for experts on their way; {ahead}"
    advice = further_ahead(figures)
    possible = 0 < (figures.horizon or 0) < figures.subject.layers
    if not possible or (figures.link_share or 0) > BUSY_LINK:
        advice = more_memory(figures)  # earlier is not possible, or does not help
    return judge(grade_low(figures.late_share, FEW_LATE, MANY_LATE), text, advice)


def check_waste(figures: Figures) -> Verdict:
    """Are experts read that nobody needs?"""
    if figures.wasted_share is None or (figures.loads_ahead or 0) < FEWEST_LOADS:
        return too_few(figures.loads_ahead, FEWEST_LOADS, "reads ahead")
    text = f"{percent(figures.wasted_share)} of reads ahead were given up unused"
    return judge(grade_low(figures.wasted_share, FEW_WASTED, MANY_WASTED), text, pickier(figures))


def check_latency(figures: Figures) -> Verdict:
    """Do reads take long beside layers?"""
    if not figures.layer_seconds or figures.load_seconds is None or (figures.loads or 0) < FEWEST_LOADS:
        return too_few(figures.loads, FEWEST_LOADS, "reads")
    layers = figures.load_seconds / figures.layer_seconds
    text = f"a read takes {duration(figures.load_seconds)}, as long as {layers:.1f} layers"
    advice = fewer_bytes(figures)
    if figures.horizon is None:
        advice = "`--mode expertflow`: it reads before experts are needed"
    elif (figures.horizon or 0) < layers <= min(SLOW, figures.subject.layers):
        advice = f"`--tune lookahead={math.ceil(layers)}`"
    return judge(grade_low(layers, QUICK, SLOW), text, advice)


def check_link(figures: Figures) -> Verdict:
    """Is the link what holds steps up?"""
    if figures.link_share is None or figures.step_bytes is None or (figures.loads or 0) < FEWEST_LOADS:
        return too_few(figures.loads, FEWEST_LOADS, "reads")
    need = f"{figures.step_bytes / 1e6:.3g} MB"
    speed = f"{(figures.link_speed or 0) / 1e6:,.3g} MB/s"
    text = f"a step reads {need} at {speed}, {percent(figures.link_share)} of the time of steps"
    status = grade_low(figures.link_share, IDLE_LINK, BUSY_LINK)
    waited = figures.wait_share or 0
    if waited <= LITTLE_WAITING:
        status = Status.GOOD  # busy, but nobody waits
    elif status is Status.BAD and waited <= MUCH_WAITING:
        status = Status.LOOK
    return judge(status, text, fewer_bytes(figures))
