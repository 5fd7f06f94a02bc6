"""What `dynaexq doctor` prints, made of `Text`: rich reads no markup in what a server or a file says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dynaexq.cli.top_state import clean
from dynaexq.doctor import Change, Figures, Finding, Status, Unit
from dynaexq.doctor.figures import UNITS
from dynaexq.doctor.verdicts import duration, percent
from dynaexq.plan.memory import format_bytes

STYLES = {Status.GOOD: "green", Status.LOOK: "yellow", Status.BAD: "red", Status.UNKNOWN: "dim"}


FORMATS: dict[Unit, Callable[[float], str]] = {
    Unit.COUNT: lambda value: f"{value:,.4g}" if value < 100 else f"{value:,.0f}",
    Unit.SHARE: percent,
    Unit.RATIO: lambda value: f"{value:.2f}",
    Unit.SECONDS: duration,
    Unit.BYTES: lambda value: format_bytes(int(value)),
    Unit.SPEED: lambda value: f"{format_bytes(int(value))}/s",
    Unit.LAYERS: lambda value: f"{value:.0f} layers",
}


def print_findings(console: Console, figures: Figures, findings: Sequence[Finding]) -> None:
    """How every check stands, and what to do about it."""
    subject = figures.subject
    name = Text(clean(subject.model) or "unknown model", "bold")
    if subject.mode:
        name.append(f"  {subject.mode}" + (f", {subject.tier}" if subject.tier else ""), "default")
    console.print(name.append(f"  {subject.layers} MoE layers of {subject.experts} experts", "dim"))
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column()
    for finding in findings:
        text = Text(finding.text)
        if finding.advice:
            text.append(f"\ntry {finding.advice}", "cyan")
        shown = ", ".join(f"{each} {show_figure(each, value)}" for each, value in finding.figures.items())
        if shown:
            text.append(f"\n{shown}", "dim")
        table.add_row(Text(finding.name), Text(finding.status.value, STYLES[finding.status]), text)
    console.print(table)


def print_changes(console: Console, changes: Sequence[Change], worse: Sequence[str], then: str, now: str) -> None:
    """Every figure in a baseline and now; `then` and `now` say of what."""
    table = Table(box=None)
    table.add_column("figure")
    for name in (Text(f"then: {clean(then)}"), Text(f"now: {clean(now)}")):
        table.add_column(name, justify="right")
    for change in changes:
        table.add_row(change.name, *(show_figure(change.name, value) for value in (change.then, change.now)))
    console.print(table)
    console.print(
        Text(f"worse than then: {', '.join(worse)}", "yellow") if worse else Text("no check is worse than then")
    )


def show_figure(name: str, value: float | None) -> str:
    """With its unit."""
    return "-" if value is None else FORMATS[UNITS[name]](value)
