"""The `dynaexq` command."""

from __future__ import annotations

from typing import Annotated

import typer

from dynaexq import __version__
from dynaexq.cli.calibrate import calibrate
from dynaexq.cli.chat import chat
from dynaexq.cli.doctor import doctor
from dynaexq.cli.evaluate import evaluate
from dynaexq.cli.generate import generate
from dynaexq.cli.inspect import inspect
from dynaexq.cli.plan import plan
from dynaexq.cli.predictor import predictor
from dynaexq.cli.prepare import prepare
from dynaexq.cli.probe import probe
from dynaexq.cli.serve import serve
from dynaexq.cli.simulate import simulate
from dynaexq.cli.synth import synth
from dynaexq.cli.top import top
from dynaexq.cli.trace import trace
from dynaexq.kernels.threads import limit_torch_threads
from dynaexq.native import limit_malloc

app = typer.Typer(
    name="dynaexq",
    help="Run Mixture-of-Experts models that do not fit: a store of expert versions, a hard memory limit.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(plan)
app.command()(prepare)
app.command()(inspect)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(evaluate)
app.command()(calibrate)
app.command()(probe)
app.command()(synth)
app.command()(simulate)
app.command()(top)
app.command()(doctor)
app.add_typer(trace)
app.add_typer(predictor)


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    """Options before the command."""
    if version:
        print(f"dynaexq {__version__}")
        raise typer.Exit


def run() -> None:
    """Run the command line."""
    limit_malloc()
    limit_torch_threads()
    app()
