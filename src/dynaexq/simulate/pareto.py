"""The runs of a sweep that no other run beats, and how to have them for real."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynaexq.policy.caching import FLOW
from dynaexq.predictor.choice import AVERAGE, NAMES
from dynaexq.simulate.sweep import OWN, PLAIN

Result = dict[str, Any]


def loss_of(result: Result) -> float:
    """What a run loses: predicted KL where it is known, else the share of traffic at the lowest tier."""
    known: float | None = result["predicted_kl"]
    return 1 - float(result["raised"]) if known is None else known


def find_front(results: Sequence[Result]) -> list[Result]:
    """Those that lose least, are fastest, or need the fewest bytes: no other is as good in all three and better in one.

    Best first: by loss, then speed.
    """
    whole = [result for result in results if "error" not in result]
    front = [each for each in whole if not any(_beats(other, each) for other in whole)]
    return sorted(front, key=lambda result: (loss_of(result), -result["tokens_per_second"]))


def make_configuration(settings: dict[str, str], fixed: dict[str, Any]) -> dict[str, Any]:
    """Options of `dynaexq generate` and `serve` (--config) for the settings of a run; `fixed` are those of all runs."""
    named = {name.replace("-", "_"): value for name, value in settings.items() if name in (*PLAIN, "expert-memory")}
    others = (*PLAIN, "expert-memory", *OWN)
    knobs = [f"{name}={value}" for name, value in settings.items() if name not in others]
    chosen = {**fixed, **named, "tune": [*fixed.get("tune", []), *knobs]}
    if chosen.get("mode") == FLOW:
        predictor = chosen.get("predictor") or AVERAGE  # a store's own would be another
        chosen["predictor"] = predictor if predictor in NAMES else str(Path(predictor).resolve())
    return {name: value for name, value in chosen.items() if value not in (None, [])}


def _beats(one: Result, other: Result) -> bool:
    pairs = [
        (loss_of(one), loss_of(other)),
        (-one["tokens_per_second"], -other["tokens_per_second"]),
        (one["expert_bytes"], other["expert_bytes"]),
    ]
    return all(mine <= theirs for mine, theirs in pairs) and any(mine < theirs for mine, theirs in pairs)
