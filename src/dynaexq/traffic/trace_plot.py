"""A picture of traces: heavy tails, heat maps, hot sets in common, and what a pass activates. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dynaexq.core import OptionError
from dynaexq.traffic.trace_statistics import TraceStatistics, overlap

HOT = 0.25
"""Of a layer's experts: the hot set whose overlap is drawn."""


def plot_traces(traces: Mapping[str, TraceStatistics], target: Path) -> None:
    """Draw traces by name into `target` (.png or .svg). Raises OptionError where that cannot be."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise OptionError("pictures need matplotlib: pip install 'dynaexq[bench]'") from None
    figure: Any = Figure(figsize=(max(12, 4 * len(traces)), 8), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    tails, common, active = top.subplots(1, 3)
    _draw_tails(tails, traces)
    _draw_overlap(common, traces)
    _draw_activation(active, traces)
    panels = np.atleast_1d(bottom.subplots(1, len(traces)))
    for panel, (name, trace) in zip(panels, traces.items(), strict=True):
        shares = trace.traffic / np.maximum(trace.traffic.sum(1, keepdims=True), 1) * trace.traffic.shape[1]
        drawn = panel.imshow(shares, aspect="auto", cmap="magma", vmin=0, vmax=4, interpolation="nearest")
        panel.set(title=name, xlabel="expert", ylabel="MoE layer")
    bottom.colorbar(drawn, ax=panels, label="traffic, of the average expert's")
    try:
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise OptionError(f"--output {target}: {error}") from error


def _draw_tails(panel: Any, traces: Mapping[str, TraceStatistics]) -> None:
    for name, trace in traces.items():
        falling = -np.sort(-trace.traffic, 1)
        shares = np.cumsum(falling, 1) / np.maximum(falling.sum(1, keepdims=True), 1)
        experts = np.arange(1, falling.shape[1] + 1) / falling.shape[1]
        (line,) = panel.plot(experts, shares.mean(0), label=name)
        panel.fill_between(experts, shares.min(0), shares.max(0), alpha=0.15, color=line.get_color(), linewidth=0)
    panel.plot([0, 1], [0, 1], ":", color="0.5")
    panel.set(title="heavy tail", xlabel="share of a layer's experts, hottest first", ylabel="share of its traffic")
    panel.legend(fontsize=8)


def _draw_overlap(panel: Any, traces: Mapping[str, TraceStatistics]) -> None:
    names = list(traces)
    values = np.array([[overlap(traces[a].traffic, traces[b].traffic, HOT) for b in names] for a in names])
    panel.imshow(values, vmin=0, vmax=1, cmap="viridis")
    for (row, column), value in np.ndenumerate(values):
        panel.text(column, row, f"{value:.2f}", ha="center", va="center", color="white" if value < 0.6 else "black")
    panel.set(title=f"common part of hot sets (top {HOT:.0%})", xticks=range(len(names)), yticks=range(len(names)))
    panel.set_xticklabels(names, rotation=30, ha="right", fontsize=8)
    panel.set_yticklabels(names, fontsize=8)


def _draw_activation(panel: Any, traces: Mapping[str, TraceStatistics]) -> None:
    for name, trace in traces.items():
        for kind, style in ((trace.decode, "o-"), (trace.prefill, "s--")):
            if kind:
                label = f"{name}, {'decode' if style == 'o-' else 'prompts'}"
                panel.plot(list(kind), list(kind.values()), style, markersize=4, label=label)
    panel.set(title="experts that one pass activates", xlabel="tokens of the pass", ylabel="share of a layer's experts")
    panel.set_xscale("log", base=2)
    panel.set_ylim(0, 1.02)
    panel.legend(fontsize=8)
