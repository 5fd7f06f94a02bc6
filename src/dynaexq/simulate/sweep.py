"""Many simulated runs over one trace: every combination of some settings, in parallel, resumable."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynaexq.core import DynaExqError, OptionError, SideFileError
from dynaexq.plan.sizes import parse_size
from dynaexq.policy.prediction import Routers
from dynaexq.simulate.costs import StepCosts
from dynaexq.simulate.options import SimulationOptions
from dynaexq.simulate.report import simulate
from dynaexq.simulate.trace_source import open_source
from dynaexq.store.files import replace_atomically, write_all
from dynaexq.traffic.trace import TraceReader
from dynaexq.tuning import GIGABYTE, KNOBS, parse_tuning

MAX_RUNS = 10_000
PLAIN = ("mode", "high", "low", "tier", "predictor")
OWN = ("link", "accuracy")
"""Settings of simulations alone."""

Settings = dict[str, str]


@dataclass(frozen=True)
class SweepJob:
    """What every run of a sweep has in common."""

    trace: Path
    store: Path | None
    expert: str | None
    costs: StepCosts
    options: SimulationOptions
    routers: Routers | None = None


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """Values by name of `NAME=V1,V2`. Raises OptionError for unknown names, none or repeated values."""
    known = (*PLAIN, "expert-memory", *OWN, *KNOBS)
    grid: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        found = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or name not in known or not found:
            raise OptionError(f"--sweep {text}: write NAME=VALUE,VALUE with a name of {', '.join(known)}")
        if name in grid or len(set(map(_normal, found))) != len(found):
            raise OptionError(f"--sweep {text}: given twice")
        grid[name] = found
    return grid


def _normal(value: str) -> str | float:
    """Alike for values that say the same."""
    try:
        return float(value)
    except ValueError:
        return value


def combine(grid: Mapping[str, Sequence[str]]) -> list[Settings]:
    """Every combination. Raises OptionError for too many."""
    runs = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if len(runs) > MAX_RUNS:
        raise OptionError(f"--sweep asks for {len(runs)} runs, more than {MAX_RUNS}; leave some values out")
    return runs


def apply_settings(options: SimulationOptions, settings: Settings) -> SimulationOptions:
    """`options` with settings in place of theirs. Raises OptionError for values that are none."""
    plain: dict[str, Any] = {name: value for name, value in settings.items() if name in PLAIN}
    if (memory := settings.get("expert-memory")) is not None:
        plain["expert_memory"] = parse_size(memory, "--sweep expert-memory")
    if (link := settings.get("link")) is not None:
        plain["link"] = parse_gigabytes(link, "--sweep link")
    if (accuracy := settings.get("accuracy")) is not None:
        plain["accuracy"] = _parse_share(accuracy)
    tune = options.tune | parse_tuning([f"{name}={value}" for name, value in settings.items() if name in KNOBS])
    return replace(options, **plain, tune=tune)


def parse_gigabytes(text: str, option: str) -> float:
    """Bytes per second of a number of GB/s. Raises OptionError."""
    try:
        value = float(text) * GIGABYTE
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise OptionError(f"{option} {text}: write gigabytes per second, such as 2.5")
    return value


def _parse_share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"--sweep accuracy={text}: write a share, such as 0.9") from None


class SweepResults:
    """Finished runs; in a file, where there is one: a line for each, and before them what they have in common."""

    def __init__(self, path: Path | None, identity: str) -> None:
        """Go on with `path`, or begin it. Raises SideFileError where it is of another sweep, or of none."""
        self.path, self._identity = path, identity
        self.done: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def add(self, settings: Settings, result: dict[str, Any]) -> None:
        """One run has finished. Raises SideFileError where it cannot be written."""
        self.done[_key(settings)] = {"settings": settings, **result}
        if self.path is None:
            return
        lines = [json.dumps({"sweep": self._identity}), *(json.dumps(each) for each in self.done.values())]
        with replace_atomically(self.path) as descriptor:
            write_all(descriptor, ("\n".join(lines) + "\n").encode())

    def missing(self, runs: Sequence[Settings]) -> list[Settings]:
        """Those of `runs` that have not finished."""
        return [settings for settings in runs if _key(settings) not in self.done]

    def of(self, runs: Sequence[Settings]) -> list[dict[str, Any]]:
        """Results of `runs`, in their order."""
        return [self.done[_key(settings)] for settings in runs]

    def _read(self, path: Path) -> None:
        try:
            head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            identity = head["sweep"]
            for number, line in enumerate(lines, 2):
                self.done[_key(line["settings"])] = _check_result(line, number)
        except (OSError, ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise SideFileError(f"{path} is no result of a sweep: {error}; give another --results") from error
        if identity != self._identity:
            raise SideFileError(
                f"{path} is of a sweep over another trace, with other costs or options; give another --results"
            )


def run_sweep(
    job: SweepJob, runs: Sequence[Settings], results: SweepResults, jobs: int, progress: Callable[[int, int], None]
) -> None:
    """Simulate what `results` does not have yet, in `jobs` processes. A run that cannot be had is a result, too."""
    missing = results.missing(runs)
    progress(len(runs) - len(missing), len(runs))
    for settings, result in _run_all(job, missing, jobs):
        results.add(settings, result)
        progress(len(runs) - len(results.missing(runs)), len(runs))


def _run_all(job: SweepJob, runs: Sequence[Settings], jobs: int) -> Iterator[tuple[Settings, dict[str, Any]]]:
    work = [(job, settings) for settings in runs]
    if jobs == 1 or len(runs) < 2:
        yield from map(_run, work)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(runs))) as pool:
        yield from pool.imap_unordered(_run, work)


def _run(work: tuple[SweepJob, Settings]) -> tuple[Settings, dict[str, Any]]:
    job, settings = work
    try:
        options = apply_settings(job.options, settings)
        reader = TraceReader.open(job.trace)
        try:
            source = open_source(reader.head, job.store, job.expert)
            report = simulate(source, options, job.costs, reader, routers=job.routers)
        finally:
            reader.close()
    except DynaExqError as error:
        return settings, {"error": str(error)}
    return settings, report.as_json()


def _check_result(line: dict[str, Any], number: int) -> dict[str, Any]:
    """A run as it was kept. Raises ValueError where that is not what a run gives."""
    if isinstance(line.get("error"), str):
        return line
    for name in ("tokens_per_second", "expert_bytes", "bytes_moved", "raised", "predicted_kl"):
        value = line[name]
        known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not known and (name, value) != ("predicted_kl", None):
            raise ValueError(f"line {number}: {name} is {value!r}")
    return line


def _key(settings: Settings) -> str:
    return json.dumps(settings, sort_keys=True)
