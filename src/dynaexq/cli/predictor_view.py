"""What `dynaexq predictor` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dynaexq.predictor.examples import Examples
from dynaexq.predictor.judging import Judgement
from dynaexq.predictor.yardsticks import Recall
from dynaexq.traffic.trace_statistics import TraceStatistics

NAMES = {
    "static": "most used",
    "average": "average",
    "pregate": "pregate",
    "linear": "linear (a bound for small ones)",
}
RESIDENTS = ((0.95, "25 to 40 %"), (0.85, "40 to 50 %"), (0.7, "60 to 75 %"))
"""Share of experts to keep resident, by how good predictions are (ExpertFlow, section 2)."""


def print_predictability(statistics: TraceStatistics, examples: Examples, found: Recall, verdict: str) -> None:
    """How well routing can be foreseen without training."""
    console = Console(highlight=False)
    console.print(f"{len(examples.ids)} tokens, {int(examples.held.sum())} of them held out")
    lag = statistics.repeats.get(1)
    again = "" if lag is None else f"; an expert is chosen again by the next token: {lag:.3f}"
    console.print(f"entropy {statistics.entropy:.3f} of even routing{again}, by chance: {statistics.chance:.3f}")
    table = Table(title="of the experts that held-out tokens choose, among as many that are named")
    table.add_column("layers ahead")
    rows = {NAMES[name]: values for name, values in found.items()}
    reach = max(map(len, rows.values()))
    for distance in range(1, reach + 1):
        table.add_column(str(distance), justify="right")
    for name, values in rows.items():
        table.add_row(name, *_cells(values))
    console.print(table)
    console.print(verdict)


def print_judgement(judgement: Judgement, name: str) -> None:
    """How good a trained predictor is."""
    console = Console(highlight=False)
    table = Table(title=f"{name}, on what was held out")
    table.add_column("layers ahead")
    for distance in range(1, len(judgement.recall) + 1):
        table.add_column(str(distance), justify="right")
    table.add_row("among as many that it names", *_cells(judgement.recall))
    table.add_row("among twice as many", *_cells(judgement.recall_double))
    table.add_row("of those likelier than not, chosen", *_cells(judgement.precision))
    console.print(table)
    console.print(f"its chances are off by {100 * judgement.calibration:.1f} points in the mean")
    if judgement.window_recall is not None and judgement.window_average is not None:
        use = "" if judgement.looks_back else ": it is left out"
        console.print(
            f"of what the tokens to come choose, the network over the last tokens names "
            f"{100 * judgement.window_recall:.1f} %, the average {100 * judgement.window_average:.1f} %{use}"
        )
    for least, share in RESIDENTS:
        if judgement.recall[0] >= least:
            console.print(f"a cache of {share} of the experts goes with that")
            return
    console.print("that is little: more tokens of the same kind of text, or a larger cache, are better")


def _cells(values: Sequence[float | None]) -> list[str]:
    return ["" if value is None else f"{100 * value:.1f} %" for value in values]
