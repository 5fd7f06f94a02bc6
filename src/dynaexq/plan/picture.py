"""A picture of a plan: every part beside the limit, at each tier. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynaexq.core import OptionError

GIB = 1 << 30


def plot_parts(name: str, bars: Mapping[str, Mapping[str, int]], limit: int, target: Path) -> None:
    """Draw bars of the same parts, in bytes, into `target` (.png or .svg). Raises OptionError where that cannot be."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise OptionError("pictures need matplotlib: pip install 'dynaexq[bench]'") from None
    figure: Any = Figure(figsize=(1.2 * len(bars) + 3, 5), layout="constrained")
    panel = figure.subplots()
    bottom = dict.fromkeys(bars, 0.0)
    for part in next(iter(bars.values())):
        heights = [parts[part] / GIB for parts in bars.values()]
        panel.bar(list(bars), heights, bottom=list(bottom.values()), label=part)
        bottom = {name: low + height for (name, low), height in zip(bottom.items(), heights, strict=True)}
    panel.axhline(limit / GIB, color="black", linestyle="--", label="limit")
    panel.set(title=name, ylabel="GiB")
    panel.legend(fontsize=8)
    try:
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise OptionError(f"--plot {target}: {error}") from error
