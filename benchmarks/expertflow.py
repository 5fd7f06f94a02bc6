"""What reading experts ahead brings, one factor at a time, beside what no cache can do better.

    python -m benchmarks.expertflow [--quick] [--json FILE|-] [--readme FILE] [--plot FILE.svg] [--parts NAMES]
                                    [--resume FILE]

A model of random weights with skewed routing and the embedded one answer prompts: with all experts resident, with
caches that read on need, and with `expertflow`. The parts `link`, `cache`, `batch` and `prompt` vary one factor each;
`paper` gives three modes the same bytes for experts; `across` judges predictors on other workloads than they learned.
With --resume, rows are kept in a file as they end, and a run goes on from there. About an hour on two cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.expertflow_across import Effort, run_across, train_on_all
from benchmarks.expertflow_contest import run_paper_row, run_row
from benchmarks.expertflow_contestant import Point
from benchmarks.expertflow_ground import EMBEDDED, MODELS, SYNTHETIC, Ground, make_ground
from benchmarks.expertflow_report import render, render_details
from benchmarks.machine import describe_run, pin_threads, publish
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.predictor.choice import NAMES
from dynaexq.store.files import replace_atomically, write_all

FACTORS: dict[str, tuple[Any, ...]] = {
    "link": (0.25, 1.0, 4.0, None),
    "cache": (0.1, 0.2, 0.3, 0.5, 0.7, 1.0),
    "batch": (1, 2, 4, 8, 16, 32),
    "prompt": (16, 64, 256, 768),
}
QUICK_FACTORS: dict[str, tuple[Any, ...]] = {"link": (1.0,), "cache": (0.3,), "batch": (1,), "prompt": (64,)}
PAPER, ACROSS = "paper", "across"
PARTS = (*FACTORS, PAPER, ACROSS)
PAPER_SHARE = 0.6
"""Of the bytes that all experts take at int4."""


class Job(NamedTuple):
    """A row to be: its key, the model that it runs on, and at which point, if at one."""

    key: str
    model: str
    point: Point | None


class Rows:
    """Rows that have ended, by key, in a file if there is one."""

    def __init__(self, path: Path | None, quick: bool) -> None:
        """Raises ValueError where the file is of the other kind of run."""
        self._path, self._quick = path, quick
        self.found: dict[str, Any] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["quick"] is not quick:
                raise ValueError(f"{path} has rows of a run {'with' if kept['quick'] else 'without'} --quick")
            self.found = kept["rows"]

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Keep a row, with the commit that it is of."""
        self.found[key] = {"commit": describe_run()["commit"], **row}
        if self._path is not None:
            text = json.dumps({"quick": self._quick, "rows": self.found}, indent=1)
            with replace_atomically(self._path) as descriptor:
                write_all(descriptor, text.encode())


def list_points(model: str, factor: str, quick: bool) -> list[Point]:
    """Points of a factor, all others at base."""
    values = (QUICK_FACTORS if quick else FACTORS)[factor]
    return [Point(model)._replace(**{factor: value}) for value in values]


def list_jobs(parts: Sequence[str], quick: bool) -> Iterator[Job]:
    """All rows, model by model; a point that several factors share is one."""
    for model in MODELS:
        points = [point for part in parts if part in FACTORS for point in list_points(model, part, quick)]
        for point in dict.fromkeys(points):
            yield Job(point.key, model, point)
        if PAPER in parts and model == SYNTHETIC:
            for point in list_points(model, "batch", quick):
                equal = point._replace(cache=PAPER_SHARE)
                yield Job(f"{PAPER}: {equal.key}", model, equal)
        if ACROSS in parts and model == EMBEDDED:
            yield Job(ACROSS, model, None)


def run_job(job: Job, ground: Ground, quick: bool) -> dict[str, Any]:
    """The row."""
    if job.point is None:
        return run_across(ground, Effort.of(quick))
    return (run_paper_row if job.key.startswith(PAPER) else run_row)(ground, job.point, quick)


def run_jobs(jobs: Sequence[Job], rows: Rows, quick: bool) -> None:
    """Run what has not ended yet."""
    pending, start = [job for job in jobs if job.key not in rows.found], time.monotonic()
    for model in MODELS:
        mine = [job for job in pending if job.model == model]
        if not mine:
            continue
        with make_ground(model, quick) as ground:
            ground.predictors = {name: name for name in (NAMES[-1:] if quick else NAMES)}
            if model == EMBEDDED and any(job.point for job in mine):
                ground.predictors["trained"] = str(train_on_all(ground, Effort.of(quick)))
            for job in mine:
                rows.add(job.key, run_job(job, ground, quick))
                gc.collect()  # models go with their cycles, before the next row needs the memory
                print(f"{time.monotonic() - start:.0f} s: {job.key}", file=sys.stderr)


def main() -> None:
    """Run what is left, print, save."""
    arguments = _parse()
    try:
        rows = Rows(arguments.resume, arguments.quick)
    except ValueError as error:
        raise SystemExit(f"--resume: {error}") from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that stores are removed
    pin_threads()
    quiet_transformers()
    jobs = list(list_jobs(arguments.parts, arguments.quick))
    run_jobs(jobs, rows, arguments.quick)
    result = {"run": describe_run(), "rows": {job.key: rows.found[job.key] for job in jobs}}
    publish(result, render(result), "expertflow", arguments.json, arguments.readme)
    if arguments.json != "-":
        print(f"\n{render_details(result)}")
    if arguments.plot:
        from benchmarks.expertflow_plot import draw  # noqa: PLC0415 (matplotlib, where a picture is wanted)

        draw(result, arguments.plot)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers, one point, few modes, one round")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    parser.add_argument("--readme", metavar="FILE", help="replace the tables between the markers of this file")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw it: .svg or .png")
    parser.add_argument("--parts", metavar="NAMES", type=_split, default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument(
        "--resume", metavar="FILE", type=Path, help="keep rows here, and go on from those that are there"
    )
    return parser.parse_args()


def _split(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names).difference(PARTS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    main()
