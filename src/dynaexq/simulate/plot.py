"""A picture of a sweep: what is lost against bytes, and the runs that no other beats. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynaexq.core import OptionError
from dynaexq.plan.memory import MIB
from dynaexq.simulate.pareto import Result, find_front, loss_of


def plot_sweep(results: Sequence[Result], target: Path) -> None:
    """Draw all runs into `target` (.png or .svg). Raises OptionError where that cannot be."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise OptionError("pictures need matplotlib: pip install 'dynaexq[bench]'") from None
    whole = [result for result in results if "error" not in result]
    front = find_front(results)
    figure = Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    speeds = [result["tokens_per_second"] for result in whole]
    points = panel.scatter([_mib(each) for each in whole], [*map(loss_of, whole)], c=speeds, s=20)
    figure.colorbar(points, label="tokens/s")
    best = sorted(front, key=_mib)
    panel.plot(
        [_mib(each) for each in best], [*map(loss_of, best)], "o", mfc="none", color="tab:red", label="not beaten"
    )
    known = any(result["predicted_kl"] is not None for result in whole)
    panel.set_xlabel("MiB of expert memory")
    panel.set_ylabel("predicted KL (nats per token)" if known else "share of traffic at the lowest tier")
    if known and min(map(loss_of, whole)) > 0:
        panel.set_yscale("log")
    panel.legend()
    panel.grid(alpha=0.3)
    try:
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise OptionError(f"--plot {target}: {error}") from error


def _mib(result: Result) -> float:
    return float(result["expert_bytes"]) / MIB
