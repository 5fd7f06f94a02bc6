"""A picture of a result of `benchmarks.expertflow`: tokens a second by factor and mode, and three modes at equal bytes.

    python -m benchmarks.expertflow_plot benchmarks/results/expertflow.json -o benchmarks/results/expertflow.svg

Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.expertflow_bound import FLOOR, LRU, find_bound
from benchmarks.expertflow_report import ACROSS, BASE, NAMES, PAPER, pick_rows, show_value

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = {
    FLOOR: ("0.3", "--"),
    LRU: ("tab:gray", "o-"),
    "lfu": ("tab:brown", "o-"),
    "two-tier": ("tab:olive", "o-"),
    "expertflow average": ("tab:orange", "o-"),
    "expertflow pregate": ("tab:red", "o-"),
    "expertflow trained": ("tab:purple", "o-"),
}
PAPER_AXES = {
    "tokens_per_second": "tokens/s", "tpot_ms": "TPOT mean (ms)", "tpot_p99_ms": "TPOT P99 (ms)",
    "wait_share": "share of time waited",
}  # fmt: skip


def draw(result: dict[str, Any], target: Path) -> None:
    """A line of panels for each model, and one for equal bytes."""
    rows = result["rows"]
    plain = [row for key, row in rows.items() if key != ACROSS and not key.startswith(PAPER)]
    paper = sorted((row for key, row in rows.items() if key.startswith(PAPER)), key=_batch)
    models = list(dict.fromkeys(row["point"]["model"] for row in plain))
    count = len(models) + bool(paper)
    if not count:
        raise SystemExit("there is nothing to draw: no row of link, cache, batch, prompt or paper")
    figure, panels = plt.subplots(count, len(BASE), figsize=(16, 3.8 * count), squeeze=False)
    for line, model in zip(panels, models, strict=False):
        mine = [row for row in plain if row["point"]["model"] == model]
        for panel, factor in zip(line, BASE, strict=True):
            _draw_factor(panel, factor, pick_rows(mine, factor))
        line[0].set_ylabel(f"{model}: tokens/s")
    if paper:
        for panel, (figure_name, label) in zip(panels[-1], PAPER_AXES.items(), strict=True):
            _draw_equal(panel, paper, figure_name, label)
    for line in panels:
        line[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def _batch(row: dict[str, Any]) -> int:
    batch: int = row["point"]["batch"]
    return batch


def _draw_factor(panel: Any, factor: str, rows: list[dict[str, Any]]) -> None:
    if rows:
        places = [show_value(factor, row) for row in rows]
        for name in rows[0]["modes"]:
            colour, style = STYLES[name]
            speeds = [row["modes"].get(name, {}).get("tokens_per_second", math.nan) for row in rows]
            panel.plot(places, speeds, style, color=colour, label=name, markersize=4)
        most = [row["modes"][LRU]["tokens_per_second"] * find_bound(row).over_lru for row in rows]
        panel.plot(places, most, ":", color="tab:blue", label="no cache is faster")
    panel.set_yscale("log")
    panel.set_xlabel(NAMES[factor])
    panel.grid(alpha=0.3)


def _draw_equal(panel: Any, rows: list[dict[str, Any]], name: str, label: str) -> None:
    batches = [str(_batch(row)) for row in rows]
    for mode in rows[0]["modes"]:
        if mode != FLOOR:
            panel.plot(batches, [row["modes"][mode][name] for row in rows], "o-", label=mode, markersize=4)
    if name != "wait_share":
        panel.set_yscale("log")
    panel.set_xlabel("batch")
    panel.set_title(f"experts held to {100 * rows[0]['point']['cache']:.0f} % of their bytes at int4", fontsize=9)
    panel.set_ylabel(label)
    panel.grid(alpha=0.3)


def main() -> None:
    """Read a result, write a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of benchmarks.expertflow")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture: .svg or .png")
    arguments = parser.parse_args()
    draw(json.loads(arguments.result.read_text()), arguments.output)


if __name__ == "__main__":
    main()
