"""What no cache can do better than, beside what `benchmarks.expertflow` measured."""

from __future__ import annotations

from typing import Any, NamedTuple

from dynaexq.policy.caching import FLOW
from dynaexq.predictor.choice import PREGATE
from dynaexq.simulate.cache import BELADY
from dynaexq.tuning import GIGABYTE

Row = dict[str, Any]
"""See expertflow_contest.run_contest."""

FLOOR, LRU, DEFAULT = "static", "lru", f"{FLOW} {PREGATE}"
"""All experts resident at the same tier: no mode that reads them takes less time; whom others are measured against; and
what `expertflow` is without a trained predictor."""


class Bound(NamedTuple):
    """What no cache can do better.

    Args:
        seconds: of a round, at least: all computing, or all bytes of the fewest reads over the link, if that is longer.
        by: which of both.
        over_lru: how many times faster than `lru` that is.
    """

    seconds: float
    by: str
    over_lru: float


def find_bound(row: Row) -> Bound:
    """Of a row with all modes."""
    computing = row["modes"][FLOOR]["seconds"]
    reading = row[BELADY]["misses"] * row["expert_bytes"] / _link(row)
    least = max(computing, reading)
    by = "bandwidth" if reading > computing else "computing"
    return Bound(least, by, row["modes"][LRU]["seconds"] / least)


def hide(row: Row, name: str) -> tuple[float, float]:
    """Share of the link's time that a mode hides, and could at most: all that it computes, beside the fewest reads.

    The engine's own `hidden` is more: it adds up the time of all reads, which wait for each other.
    """
    mode = row["modes"][name]
    carried = mode["bytes_moved"] / _link(row)
    least = row[BELADY]["misses"] * row["expert_bytes"] / _link(row)
    hidden = max(0.0, 1 - mode["wait_seconds"] / carried) if carried else 0.0
    return hidden, min(1.0, (mode["seconds"] - mode["wait_seconds"]) / least) if least else 1.0


def _link(row: Row) -> float:
    """Bytes per second: of the link, or of the store where that is less."""
    rate: float = min(row["read_gbps"], row["link_gbps"] or row["read_gbps"])
    return GIGABYTE * rate
