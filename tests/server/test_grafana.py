"""The Grafana dashboard asks for metrics that there are, all of them, and its panels do not overlap."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from dynaexq.server.cache_metrics import COUNTERS as CACHE_COUNTERS
from dynaexq.server.cache_metrics import GAUGES as CACHE_GAUGES

TEXT = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads(TEXT)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

COUNTERS = {
    "requests_total", "prompt_tokens_total", "reused_tokens_total", "generated_tokens_total",
    "step_tokens_total", "promotions_total", "demotions_total", "evictions_total", "deferred_total",
    "failed_total", "bytes_moved_total", "waits_total", "wait_seconds_total", "link_busy_seconds_total",
    "layer_promotions_total", "layer_demotions_total",
    *(f"cache_{name}_total" for name in CACHE_COUNTERS), "cache_loads_total",
}  # fmt: skip
GAUGES = {
    "waiting", "running", "slots_free", "budget_bytes", "budget_used_bytes", "budget_free_bytes",
    "memory_bytes", "hi_hit_share", "layer_hi_hit_share", "resident_experts", "resident_bytes", "in_flight",
    "reclaim_waiting", "paused", *(f"cache_{name}" for name, _ in CACHE_GAUGES.values()),
}  # fmt: skip
HISTOGRAMS = {
    "queue_seconds", "ttft_seconds", "tpot_seconds", "request_seconds", "step_seconds", "step_model_seconds",
}  # fmt: skip
LABELS = {
    "requests_total": {"reason"},
    "step_tokens_total": {"kind"},
    "memory_bytes": {"part"},
    "layer_hi_hit_share": {"layer"},
    "resident_experts": {"layer", "tier"},
    "resident_bytes": {"layer", "tier"},
    "layer_promotions_total": {"layer"},
    "layer_demotions_total": {"layer"},
    "cache_loads_total": {"kind"},
}
EVERYWHERE = {"instance", "le"}


def targets() -> list[dict[str, Any]]:
    return [target for panel in PANELS for target in panel.get("targets", ())]


def names(expression: str) -> set[str]:
    return set(re.findall(r"dynaexq_(\w+)", expression))


def test_only_known_metrics_and_every_one_of_them() -> None:
    parts = {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
    asked = set().union(*(names(target["expr"]) for target in targets()))
    assert asked <= {*COUNTERS, *GAUGES, *parts}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in asked} == {*COUNTERS, *GAUGES, *HISTOGRAMS}


def test_counters_are_asked_for_their_growth() -> None:
    for target in targets():
        for name in names(target["expr"]) - GAUGES:
            assert re.search(rf"(rate|increase)\(dynaexq_{name}\{{[^}}]*\}}\[\$__\w+\]\)", target["expr"]), target


def test_labels_exist() -> None:
    for target in targets():
        wanted = set(itertools.chain(*(re.findall(r"\w+", by) for by in re.findall(r"by \(([^)]*)\)", target["expr"]))))
        wanted |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        known = set().union(*(LABELS.get(name, set()) for name in names(target["expr"])))
        assert wanted <= known | EVERYWHERE, target
        assert target["expr"].count("(") == target["expr"].count(")")


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in PANELS:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24
        for cell in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            assert cell not in taken, (panel["title"], taken[cell])
            taken[cell] = panel["title"]
    identifiers = [panel["id"] for panel in PANELS]
    assert len(set(identifiers)) == len(identifiers)


def test_the_data_source_is_chosen_in_grafana() -> None:
    assert DASHBOARD["schemaVersion"] == 39
    source, server = DASHBOARD["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert server["datasource"] == SOURCE
    assert [panel["title"] for panel in PANELS if panel["type"] == "row"] == [
        "Traffic", "Latency", "Experts", "Transitions", "Memory", "Cache",
    ]  # fmt: skip
    assert all(panel["datasource"] == SOURCE for panel in PANELS if panel["type"] != "row")
    assert all('{instance=~"$instance"}' in target["expr"] for target in targets())
