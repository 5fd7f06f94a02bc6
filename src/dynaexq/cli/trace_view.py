"""What `dynaexq trace info` prints, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynaexq.traffic.trace import TraceHead
from dynaexq.traffic.trace_statistics import TraceStatistics


def print_trace(name: str, head: TraceHead, found: TraceStatistics) -> None:
    """One trace, for people."""
    layers = f"{head.layers} MoE layers of {head.experts} experts"
    print(f"{name}: {head.model or 'unknown model'}, {layers}, {head.top_k} a token")
    duration = f", {found.seconds:.1f} s" if found.seconds else ""
    print(
        f"  {found.tokens} tokens ({found.prompt_tokens} of prompts) in {found.windows} passes of {found.requests} "
        f"requests{duration} ({head.source})"
    )
    shares = ", ".join(f"top {share:.0%} take {100 * value:.1f} %" for share, value in found.concentration.items())
    print(f"  traffic: {shares}; entropy {found.entropy:.3f} of even routing")
    repeats = ", ".join(f"{lag}: {value:.3f}" for lag, value in found.repeats.items() if value is not None)
    if repeats:
        print(f"  an expert is chosen again, tokens later {repeats}; by chance {found.chance:.3f}")
    for kind, values in (("decode", found.decode), ("prompts", found.prefill)):
        if values:
            steps = ", ".join(f"{tokens}: {100 * value:.1f} %" for tokens, value in values.items())
            print(f"  experts that one pass activates, by tokens ({kind}): {steps}")


def print_overlaps(overlaps: Mapping[float, Sequence[tuple[str, str, float]]]) -> None:
    """How much hot sets of traces have in common."""
    for share, pairs in overlaps.items():
        for first, second, value in pairs:
            print(f"hot sets (top {share:.0%}) of {first} and {second}: {100 * value:.1f} % in common")


def describe_trace(head: TraceHead, found: TraceStatistics) -> dict[str, Any]:
    """One trace, for machines."""
    return {**head.model_dump(), **found._asdict(), "traffic": found.traffic.tolist()}
