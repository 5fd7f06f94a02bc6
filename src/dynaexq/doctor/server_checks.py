"""Checks of any server: time before a slot, the tail of steps, memory, what fails."""

from __future__ import annotations

import math

from dynaexq.doctor.advice import more_memory
from dynaexq.doctor.figures import Figures
from dynaexq.doctor.verdicts import Status, Verdict, duration, grade_low, judge, percent, too_few

FEWEST_ENDS = 20
"""Requests that must have ended in the last minute: below, a 99th percentile is one request."""

FEWEST_STEPS = 100
"""Engine steps, for the same reason."""

SHORT_QUEUE, LONG_QUEUE = 1.0, 10.0
"""Seconds before a slot: people notice the first, and give up around the second."""

EVEN_ANSWERS, UNEVEN_ANSWERS = 2.5, 5.0
"""99th percentile over median, of the time between tokens in the mean of an answer: readers see twice the time."""

EVEN_STEPS, UNEVEN_STEPS = 12.0, 40.0
"""The same of single steps: one with a chunk of a prompt takes some ten times as long as one without."""

LARGE_PART = 0.25
"""Of the bytes of experts: a part of memory that large is worth making smaller where experts lack memory."""

ENOUGH_HITS, ENOUGH_HIGH = 0.9, 0.9
"""Share of needs met, or of traffic above the lowest tier, from which more memory for experts brings little."""

MANY_SLOTS = 64
"""More at a time make every step slow, and need nearly all experts of a layer at once."""


def check_queue(figures: Figures) -> Verdict:
    """Do requests wait long for a slot?"""
    if figures.queue_p99 is None or figures.slots is None or (figures.queue_count or 0) < FEWEST_ENDS:
        return too_few(figures.queue_count, FEWEST_ENDS, "requests of the last minute")
    slots = int(figures.slots)
    advice = f"`--slots {2 * slots}`: more run at a time"
    if slots >= MANY_SLOTS:
        advice = "a shorter `--queue`: who would wait long hears so at once"
    text = f"99 % of requests waited for a slot at most {duration(figures.queue_p99)}"
    return judge(grade_low(figures.queue_p99, SHORT_QUEUE, LONG_QUEUE), text, advice)


def check_tail(figures: Figures) -> Verdict:
    """Do some answers come much slower than others, or where too few have ended, some steps?"""
    advice = "`--step-tokens 64` (default 128): smaller parts of prompts between the tokens of others"
    if figures.tpot_p50 and figures.tpot_p99 and (figures.tpot_count or 0) >= FEWEST_ENDS:
        times = figures.tpot_p99 / figures.tpot_p50
        text = f"1 % of answers take {times:.1f} times the median or longer between tokens"
        return judge(grade_low(times, EVEN_ANSWERS, UNEVEN_ANSWERS), text, advice)
    if not figures.step_p50 or figures.step_p99 is None or (figures.step_count or 0) < FEWEST_STEPS:
        return too_few(figures.step_count, FEWEST_STEPS, "steps of the last minute")
    times = figures.step_p99 / figures.step_p50
    text = f"1 % of steps take {times:.1f} times the median or longer"
    return judge(grade_low(times, EVEN_STEPS, UNEVEN_STEPS), text, advice)


def check_memory(figures: Figures) -> Verdict:
    """Where experts lack memory: does something else hold much of it?"""
    if (figures.steps or 0) < FEWEST_STEPS or not figures.expert_bytes:
        return too_few(figures.steps, FEWEST_STEPS, "steps")
    if (figures.capacity or math.inf) < (figures.needs_per_layer or 0):
        text = f"a layer needs {figures.needs_per_layer:.0f} experts at once, {figures.capacity:.0f} fit"
        return Verdict(Status.BAD, text, more_memory(figures))
    met, high = figures.hit_rate, figures.high_traffic
    if (met is None or met >= ENOUGH_HITS) and (high is None or high >= ENOUGH_HIGH):
        return Verdict(Status.GOOD, "experts have the memory that they use")
    parts = (
        ("keys and values", figures.kv_bytes or 0, "`--kv-dtype int8`"),
        ("activations", figures.activation_bytes or 0, "`--step-tokens 64` (default 128)"),
        ("dense weights", figures.dense_bytes or 0, "`--dense int4` (default int8)"),
    )
    part, nbytes, advice = max(parts, key=lambda each: each[1])
    share = nbytes / figures.expert_bytes
    text = f"experts could use more memory; {part} hold {percent(share)} of what experts have"
    status = Status.GOOD if share < LARGE_PART else Status.LOOK
    return judge(status, text, f"{advice}: under `--memory`, experts get what that frees")


def check_failures(figures: Figures) -> Verdict:
    """Did reads of experts fail?"""
    tried = (figures.loads or 0) + (figures.moves or 0) + (figures.failed or 0)
    if figures.failed is None or not tried:
        return too_few(tried, 1, "reads of experts")
    text = f"{figures.failed:,.0f} of {tried:,.0f} reads of experts failed"
    status = Status.BAD if figures.failed else Status.GOOD
    return judge(status, text, "`dynaexq inspect STORE --verify`: it finds what the disk does not give back whole")
