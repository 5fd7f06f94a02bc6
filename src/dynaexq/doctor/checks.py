"""All checks: to whom each applies, and the figures that it goes by."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dynaexq.doctor import cache_checks, move_checks, server_checks, trace_checks
from dynaexq.doctor.figures import Figures
from dynaexq.doctor.verdicts import Status, Verdict


def _serves(figures: Figures) -> bool:
    return figures.subject.kind == "server"


def _reads(figures: Figures) -> bool:
    return figures.capacity is not None


def _foresees(figures: Figures) -> bool:
    return figures.horizon is not None


def _moves(figures: Figures) -> bool:
    return figures.moves is not None


def _reads_or_moves(figures: Figures) -> bool:
    return _reads(figures) or _moves(figures)


def _is_trace(figures: Figures) -> bool:
    return figures.subject.kind == "trace"


class Check(NamedTuple):
    """`judge` says how it stands, by the figures of these names; it is asked only where `applies`."""

    name: str
    figures: tuple[str, ...]
    applies: Callable[[Figures], bool]
    judge: Callable[[Figures], Verdict]


CHECKS = (
    Check("prediction", ("recall", "precision", "needs"), _foresees, cache_checks.check_prediction),
    Check("hits", ("hit_rate", "capacity", "needs_per_step"), _reads, cache_checks.check_hits),
    Check("hidden", ("hidden", "wait_share", "queued", "reading"), _reads, cache_checks.check_hidden),
    Check("late", ("late_share", "horizon"), _foresees, cache_checks.check_late),
    Check("waste", ("wasted_share", "threshold"), _foresees, cache_checks.check_waste),
    Check("latency", ("load_seconds", "layer_seconds", "loads"), _reads, cache_checks.check_latency),
    Check("link", ("link_share", "link_speed", "step_bytes"), _reads, cache_checks.check_link),
    Check("transitions", ("deferred_share", "moves"), _moves, move_checks.check_deferred),
    Check("waits", ("wait_share",), _moves, move_checks.check_waits),
    Check("reclaim", ("reclaiming", "moving"), _moves, move_checks.check_reclaim),
    Check("choice", ("high_traffic", "high_experts"), _moves, move_checks.check_high),
    Check("failures", ("failed",), _reads_or_moves, server_checks.check_failures),
    Check("queue", ("queue_p50", "queue_p99", "waiting", "slots"), _serves, server_checks.check_queue),
    Check("tail", ("step_p50", "step_p99", "tpot_p50", "tpot_p99"), _serves, server_checks.check_tail),
    Check("memory", ("memory_used", "memory_limit", "expert_bytes"), _serves, server_checks.check_memory),
    Check("routing", ("entropy", "repeats", "chance"), _is_trace, trace_checks.check_routing),
    Check("skew", ("entropy",), _is_trace, trace_checks.check_skew),
    Check("repetition", ("repeats", "chance"), _is_trace, trace_checks.check_repetition),
    Check("stability", ("stability", "selections"), _is_trace, trace_checks.check_stability),
    Check("spread", ("spread", "spread_tokens"), _is_trace, trace_checks.check_spread),
)
"""In the order in which they are shown."""


class Finding(NamedTuple):
    """What a check said, and the figures that it went by."""

    name: str
    status: Status
    text: str
    advice: str
    figures: dict[str, float]


def examine(figures: Figures) -> list[Finding]:
    """Everything that applies."""
    known = dict(figures.known())
    return [
        Finding(check.name, *check.judge(figures), {name: known[name] for name in check.figures if name in known})
        for check in CHECKS
        if check.applies(figures)
    ]
