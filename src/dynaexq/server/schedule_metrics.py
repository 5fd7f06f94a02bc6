"""What Prometheus sees of token scheduling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, InfoMetricFamily, Metric

COUNTERS = {
    "steps": "Steps with decoding sequences",
    "split": "Of those, steps that left some out",
    "left_out": "Sequences that steps left out",
    "forced": "Sequences that took part because they had been left out for too long",
    "groups": "Groups that took over from another",
    "overtaken": "Waiting requests before which a later one was admitted",
    "seconds": "Spent in deciding, and in learning what sequences need",
}


def describe_scheduling(scheduling: Mapping[str, Any]) -> Iterator[Metric]:
    """Of a scheduler that described itself (TokenScheduler.describe)."""
    granularity = {"granularity": str(scheduling["granularity"])}
    yield InfoMetricFamily("dynaexq_schedule", "Which sequences run together", value=granularity)
    for name, text in COUNTERS.items():
        yield CounterMetricFamily(f"dynaexq_schedule_{name}", text, value=float(scheduling[name]))
