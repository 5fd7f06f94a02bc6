"""A picture of a result of `benchmarks.budgets`: KL against the bytes of experts, all methods on one axis.

    python -m benchmarks.budgets_plot benchmarks/results/budgets.json -o benchmarks/results/budgets.svg

Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.adaptive_report import SINGLE_MAPS
from benchmarks.budgets_report import kl
from dynaexq.formats.quantizers import CALIBRATED

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LINES = {
    "paper": ("the paper's way (rtn, two tiers, equal slots)", "tab:gray", "o-"),
    "fitted": ("the same on fitted versions", "tab:blue", "o-"),
    "map of stream": ("static map of the whole stream, all tiers", "tab:brown", "s--"),
    "all tiers": ("online, all tiers over the model", "tab:red", "o-"),
}


def draw(result: dict[str, Any], target: Path) -> None:
    """KL over the stream, on a logarithmic axis, by bits per expert weight."""
    figure, panel = plt.subplots(figsize=(8, 5))
    for method, (label, colour, style) in LINES.items():
        values = [1000 * kl(result, f"{bits:g} {method}") for bits in result["bits"]]
        panel.plot(result["bits"], values, style, color=colour, label=label, markersize=4)
    others = [[1000 * kl(result, f"{bits:g} {name}") for name in SINGLE_MAPS] for bits in result["bits"]]
    panel.fill_between(
        result["bits"], [*map(min, others)], [*map(max, others)], color="tab:brown", alpha=0.2, linewidth=0,
        label="static maps of one workload: best to worst",
    )  # fmt: skip
    for quantizer, colour in (("rtn", "0.5"), (CALIBRATED, "tab:blue")):
        names = [name for name in result["methods"] if name.startswith("uniform") and name.endswith(quantizer)]
        points = sorted((result["methods"][name]["bits"], 1000 * kl(result, name)) for name in names)
        panel.plot(*zip(*points, strict=True), "x", color=colour, label=f"uniform tiers, {quantizer}")
    panel.set_yscale("log")
    panel.set_xlabel("expert bytes, in bits per weight (scales, padding and spare blocks included)")
    panel.set_ylabel("KL to bf16 over text, math, code (0.001 nats/token)")
    panel.legend(fontsize=8)
    panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Read a result, write a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of benchmarks.budgets")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture: .svg or .png")
    arguments = parser.parse_args()
    draw(json.loads(arguments.result.read_text()), arguments.output)


if __name__ == "__main__":
    main()
