"""What benchmarks over a stream of workloads have in common: their options, and processes of their own."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.machine import THREADS

Part, Result = TypeVar("Part"), TypeVar("Result")


def run_in_processes(function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """`function` of every part, each in a process of its own, on as many cores as all benchmarks use."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    with multiprocessing.get_context("spawn").Pool(len(parts)) as pool:
        return pool.map(function, parts, chunksize=1)


def make_parser(description: str | None, quick: str) -> argparse.ArgumentParser:
    """Options of all such benchmarks; `quick` says what --quick leaves out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--texts", type=Path, help="directory with the texts that are not shipped")
    parser.add_argument("--jobs", type=int, default=THREADS, choices=(1, THREADS), help="processes of one thread each")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    parser.add_argument("--readme", metavar="FILE", help="replace the table between the markers of this file")
    return parser
