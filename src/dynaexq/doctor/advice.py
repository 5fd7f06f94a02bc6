"""Changes that several checks advise, each with the option's name."""

from __future__ import annotations

import math

from dynaexq.doctor.figures import Figures

MORE = 1.5
"""Times the memory of experts, as a next step: one change at a time, then look again."""

THRESHOLD_STEP, HIGHEST_THRESHOLD, LOWEST_THRESHOLD = 0.2, 0.9, 0.1
MOST_IN_FLIGHT = 16
"""Reads ahead at once: beyond, what is needed now waits behind what may be needed."""

LOWEST_TIERS = ("int1", "int2")
"""Below, answers are no longer worth having."""


def more_memory(figures: Figures) -> str:
    """For experts."""
    return f"`--expert-memory {math.ceil(MORE * (figures.expert_bytes or 0) / (1 << 20))}M` (or a larger `--memory`)"


def further_ahead(figures: Figures) -> str:
    """Reading begins earlier."""
    return f"`--tune lookahead={int(figures.horizon or 0) + 1}`"


def pickier(figures: Figures) -> str:
    """Only the likelier are read ahead."""
    return f"`--tune threshold={min(HIGHEST_THRESHOLD, (figures.threshold or 0.5) + THRESHOLD_STEP):.2g}`"


def less_picky(figures: Figures) -> str:
    """Those that are less likely are read ahead too."""
    return f"`--tune threshold={max(LOWEST_THRESHOLD, (figures.threshold or 0.5) - THRESHOLD_STEP):.2g}`"


def more_at_once(figures: Figures) -> str:
    """More reads ahead go on side by side."""
    return f"`--tune in_flight={min(MOST_IN_FLIGHT, 2 * int(figures.in_flight or 4))}`"


def fewer_bytes(figures: Figures) -> str:
    """For each read; or fewer reads, where tiers go no lower."""
    if figures.subject.tier in LOWEST_TIERS:
        return more_memory(figures)
    return f"a `--tier` below {figures.subject.tier}: fewer bytes for each read"
