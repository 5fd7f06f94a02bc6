"""A picture of a result of `benchmarks.adaptive`: KL of every forward pass while the workload shifts.

    python -m benchmarks.adaptive_plot benchmarks/results/adaptive.json -o benchmarks/results/adaptive.svg

Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LINES = {
    "static low": ("all low", "0.6", "-"),
    "uniform": ("uniform", "0.3", "--"),
    "map of text": ("map of text", "tab:green", "-"),
    "map of math": ("map of math", "tab:orange", "-"),
    "map of code": ("map of code", "tab:purple", "-"),
    "map of stream": ("map of the whole stream", "tab:brown", "-"),
    "dynaexq": ("dynaexq", "tab:red", "-"),
}


def draw(result: dict[str, Any], names: list[str], target: Path) -> None:
    """One panel for each cell of `names`."""
    figure, panels = plt.subplots(len(names), 1, figsize=(9, 3.2 * len(names)), sharex=True, squeeze=False)
    passes = result["passes"]
    for panel, name in zip(panels[:, 0], names, strict=True):
        cell = result["cells"][name]
        for variant, (label, colour, style) in LINES.items():
            text = f"uniform {cell['uniform_tier']}" if variant == "uniform" else label
            width = 2.2 if variant == "dynaexq" else 1.0
            panel.plot(cell["kl_by_pass"][variant], style, color=colour, linewidth=width, label=text)
        for phase in (1, 2):
            panel.axvline(phase * passes - 0.5, color="0.8", linewidth=0.8)
        panel.set_title(f"{name}, {cell['bytes'] / (1 << 20):.1f} MiB of experts", fontsize=10)
        panel.set_ylabel("KL to bf16 (nats/token)")
        panel.set_ylim(bottom=0)
    panels[-1, 0].set_xlabel(f"forward pass ({result['tokens_per_pass']:,} tokens): text, then math, then code")
    panels[0, 0].legend(fontsize=8, ncol=2)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Read a result, write a picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of benchmarks.adaptive")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the picture: .svg or .png")
    parser.add_argument("--cell", action="append", help="a row of the table, repeatable (default: all)")
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text())
    draw(result, arguments.cell or list(result["cells"]), arguments.output)


if __name__ == "__main__":
    main()
