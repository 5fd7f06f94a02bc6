"""What Prometheus sees of a cache of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

COUNTERS = {
    "hits": "Needs of layers for experts that were resident",
    "misses": "Needs for experts that were not",
    "late": "Of the misses, experts that were on their way",
    "useful": "Experts read ahead that were needed",
    "wasted": "Experts read ahead that left before they were needed",
    "cancelled": "Wishes to read ahead that were given up before reading began",
    "predicted": "Experts that layers were expected to need",
    "predicted_right": "Of those predicted, experts that layers needed",
    "load_seconds": "Spent in reads of experts; those side by side count each",
}
GAUGES = {
    "recall": ("recall", "Share of needs that were predicted, since the start"),
    "precision": ("precision", "Share of predictions that were needed, since the start"),
    "hidden": ("hidden_share", "Share of the time of reads that no layer waited for, since the start"),
    "horizon": ("horizon_layers", "How far ahead experts are read"),
    "queued": ("reads_queued", "Reads that are wished for and have not begun"),
    "reading": ("reads_going_on", "Reads that have begun and not ended"),
    "capacity": ("blocks", "Experts that can be resident"),
}
"""By what it is called where a cache describes itself. Modes that do not read ahead lack some."""


def describe_cache(cache: Mapping[str, float]) -> Iterator[Metric]:
    """Of a cache that described itself (CachedExperts.describe)."""
    for name, text in COUNTERS.items():
        if name in cache:
            yield CounterMetricFamily(f"dynaexq_cache_{name}", text, value=float(cache[name]))
    loads = CounterMetricFamily("dynaexq_cache_loads", "Reads of experts that ended well, by kind", labels=["kind"])
    loads.add_metric(["ahead"], float(cache["loads_ahead"]))
    loads.add_metric(["need"], float(cache["loads"] - cache["loads_ahead"]))
    yield loads
    for name, (metric, text) in GAUGES.items():
        if name in cache:
            yield GaugeMetricFamily(f"dynaexq_cache_{metric}", text, value=float(cache[name]))
