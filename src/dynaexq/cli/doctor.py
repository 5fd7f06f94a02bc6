"""`dynaexq doctor`: what a running server's figures, or a trace, say about its options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dynaexq import __version__
from dynaexq.cli.doctor_state import describe_server
from dynaexq.cli.doctor_view import print_changes, print_findings
from dynaexq.cli.options import JsonOption
from dynaexq.cli.output import check_json_target, check_output, progress_bar, reports_errors, stderr, write_json
from dynaexq.cli.serve import API_KEY_VARIABLE
from dynaexq.cli.top import DEFAULT_URL
from dynaexq.cli.top_client import StateClient
from dynaexq.core import OptionError
from dynaexq.doctor import Baseline, Figures, Finding, Status, Subject, examine
from dynaexq.doctor.baseline import check_target
from dynaexq.doctor.figures import UNITS
from dynaexq.doctor.trace_figures import measure_figures, subject_of
from dynaexq.traffic.trace import TraceReader

SOME_BAD = 1
"""Exit code of --strict."""


@reports_errors
def doctor(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="[URL|TRACE]", help="A server's address, or a trace of --record, .parquet.")
    ] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=API_KEY_VARIABLE, help="The server's key.", show_default=False, show_envvar=True),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Compare with what --save-baseline kept.", show_default=False)
    ] = None,
    save_baseline: Annotated[
        Path | None, typer.Option(help="Keep the figures in this file, to compare with later.", show_default=False)
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 if any check is bad.")] = False,
    json_target: JsonOption = None,
) -> None:
    """Say how a running server is doing, check by check, and which option to change.

    Each check is good, look (could be better), bad or unknown (too little was seen), and names at most one change.
    Keep a baseline first, then change one thing at a time. Of a trace: how well its routing can be foreseen.

    Examples:

      dynaexq doctor

      dynaexq doctor http://127.0.0.1:9000 --save-baseline before.json

      dynaexq doctor --baseline before.json --strict

      dynaexq doctor run.parquet --json -
    """
    served = "://" in target
    trace = None if served else Path(target)
    if trace is not None:
        _check_trace(trace, _typed(context, "api_key"))
    _check_files(baseline, save_baseline, json_target, trace)
    before = Baseline.load(baseline) if baseline else None

    def accept(subject: Subject) -> None:
        if before and baseline:
            before.check_subject(subject, baseline)

    figures = _measure_trace(trace, accept) if trace else _ask(StateClient(target, api_key), accept)
    findings = examine(figures)
    if json_target != "-":
        _print(figures, findings, before)
    if save_baseline:
        Baseline.of(figures, findings, f"DynaExq {__version__}").save(save_baseline)
        stderr.print(f"kept {len(dict(figures.known()))} figures in {save_baseline}", markup=False)
    if json_target:
        write_json(json_target, describe(figures, findings, before))
    if strict and any(finding.status is Status.BAD for finding in findings):
        sys.exit(SOME_BAD)  # typer.Exit would be an unexpected error here


def describe(figures: Figures, findings: Sequence[Finding], before: Baseline | None) -> dict[str, Any]:
    """The result, for machines."""
    compared = before and {
        "subject": before.subject.model_dump(),
        "figures": {change.name: {"then": change.then, "now": change.now} for change in before.compare(figures)},
        "worse": before.worse(findings),
    }
    return {
        **figures.subject.model_dump(),
        "checks": [{**finding._asdict(), "status": finding.status.value} for finding in findings],
        "figures": dict(figures.known()),
        "units": {name: UNITS[name].value for name, _ in figures.known()},
        "baseline": compared,
    }


def _print(figures: Figures, findings: Sequence[Finding], before: Baseline | None) -> None:
    console = Console(highlight=False)
    print_findings(console, figures, findings)
    if before:
        then, now = (_describe_setting(each) for each in (before.subject, figures.subject))
        print_changes(console, before.compare(figures), before.worse(findings), then, now)


def _describe_setting(subject: Subject) -> str:
    return ", ".join(each for each in (subject.mode, subject.tier) if each) or subject.kind


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_trace(path: Path, keyed: bool) -> None:
    """Raise OptionError for what is neither an address nor a file, and for a key that a file does not ask for."""
    if path.suffix != ".parquet" and not path.is_file():
        raise OptionError(
            f"{str(path)!r} is neither a server's address nor a trace; give http://HOST:PORT or FILE.parquet"
        )
    if keyed:
        raise OptionError("--api-key does nothing with a trace; leave it out")


def _check_files(baseline: Path | None, kept: Path | None, json_target: str | None, trace: Path | None) -> None:
    check_json_target(json_target, baseline, kept, trace)
    if kept is not None:
        check_output("--save-baseline", kept, baseline, trace)
        check_target(kept)


def _ask(client: StateClient, accept: Callable[[Subject], None]) -> Figures:
    figures = describe_server(client.fetch()[0])
    accept(figures.subject)
    return figures


def _measure_trace(path: Path, accept: Callable[[Subject], None]) -> Figures:
    reader = TraceReader.open(path)
    try:
        accept(subject_of(reader.head))
        with progress_bar() as progress:
            return measure_figures(reader, lambda done, total: progress("reading", done, total))
    finally:
        reader.close()
