"""Where output goes: results and JSON to stdout, everything else to stderr; errors become exit codes."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dynaexq.core import DynaExqError, OptionError
from dynaexq.plan.memory import format_bytes
from dynaexq.store import MANIFEST_NAME

P = ParamSpec("P")
R = TypeVar("R")

stderr = Console(stderr=True, highlight=False, soft_wrap=True)
INTERRUPTED = 130


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn the errors a user can meet into one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        warnings.showwarning = _show_warning
        try:
            return command(*args, **kwargs)
        except DynaExqError as error:
            stderr.print(f"[red]error:[/red] {escape(str(error))}")
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            stderr.print("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except Exception as error:
            if os.environ.get("DYNAEXQ_DEBUG"):
                raise
            reason = str(error).strip().splitlines()[:1] or [""]
            stderr.print(f"[red]error:[/red] unexpected {type(error).__name__}: {escape(reason[0])}")
            stderr.print("this should have been a clearer message; DYNAEXQ_DEBUG=1 shows where it came from")
            raise typer.Exit(DynaExqError.exit_code) from None

    return run


def check_json_target(target: str | None, *others: Path | None) -> None:
    """Raise OptionError now if the JSON file could not be written later, or is one of `others`."""
    if target not in (None, "-"):
        check_output("--json", Path(str(target)), *others)


def check_output(option: str, path: Path, *others: Path | None) -> None:
    """Raise OptionError unless a file can be written to `path` that is none of `others` and no part of a model."""
    try:
        real = path.resolve()
        if path.is_dir() or not real.parent.is_dir() or not os.access(real.parent, os.W_OK):
            raise OptionError(f"{option} {path}: not a file in an existing, writable directory")
        for place in (real.parent, real.parent.parent):
            if (place / MANIFEST_NAME).exists() or (place / "config.json").exists():
                raise OptionError(f"{option} {path}: {place} is a model's directory; write the result elsewhere")
        if any(other is not None and other.resolve() == real for other in others):
            raise OptionError(f"{option} {path}: the same file is given for another option")
    except (OSError, RuntimeError) as error:  # names too long, loops of links
        raise OptionError(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from error


def check_outputs(outputs: Mapping[str, Path | str | None], inputs: Iterable[Path | None]) -> None:
    """Check the files that options write (`-`: stdout): none may be another's, or one that is read.

    Raises:
        OptionError: see check_output and, of `--plot`, check_picture.
    """
    written = {option: Path(path) for option, path in outputs.items() if path is not None and path != "-"}
    for option, path in written.items():
        if option == "--plot":
            check_picture(option, path)
        check_output(option, path, *(other for name, other in written.items() if name != option), *inputs)


def check_picture(option: str, path: Path) -> None:
    """Raise OptionError unless a picture can be drawn into such a file."""
    if path.suffix not in (".png", ".svg"):
        raise OptionError(f"{option} {path}: name a file that ends in .png or .svg")
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(f"{option}: pictures need matplotlib: pip install 'dynaexq[bench]'")


def write_json(target: str, result: dict[str, Any]) -> None:
    """Write a result to a file, or to stdout for `-`."""
    text = json.dumps(result, indent=2, allow_nan=False)
    if target == "-":
        print(text)
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--json {target}: {error.strerror or error}") from error


def print_moves(report: dict[str, Any]) -> None:
    """Say what happened to expert versions."""
    stderr.print(
        f"moves: {report['promotions']} promotions, {report['demotions']} demotions, {report['evictions']} evictions, "
        f"{format_bytes(report['bytes_moved'])}; {report['deferred']} deferred, {report['failed']} failed; "
        f"{100 * report['hot_share_high']:.1f} % of routed traffic above {report['tier']}"
    )
    signals = report["signals"]
    if signals and signals["shadow"] and signals["shadow"]["probes"]:
        shadow = signals["shadow"]
        stderr.print(
            f"shadow: {shadow['probes']} versions compared on {shadow['selections']} selections, losses "
            f"{shadow['ratio']:.2f} of what calibration said; {signals['shifts']} shifts of the workload"
        )


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show (what, done, total) on stderr, one bar for each `what`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=stderr, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            name = what.partition(":")[0]
            if name not in tasks:
                tasks[name] = bars.add_task(what, total=total or None)
            bars.update(tasks[name], completed=done, description=what)

        yield show


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    stderr.print(f"[yellow]warning:[/yellow] {escape(str(message))}")
