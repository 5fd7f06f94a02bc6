"""A server under load: time to the first token, between tokens, and in all, from 1 to 32 clients at a time.

    python -m benchmarks.serve [--quick] [--json FILE|-] [--readme FILE] [--directory DIR]

Each mode is a `dynaexq serve` of its own, all started beforehand and asked in turns, by clients in one more process on
the same two cores. `static`, `uniform` and `dynaexq` share one limit on expert memory; `full` has none, and shows what
the others save. The embedded model, then random weights in four layers of Qwen3-30B-A3B's geometry.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import describe_run, pin_threads, publish
from benchmarks.serve_clients import Clients, Job
from dynaexq.integrations.transformers.loading import open_experts
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.store import PrepareOptions, prepare_store

CLIENTS = (1, 2, 4, 8, 16, 32)
SHOWN = (1, 8, 32)
ROUNDS = 3


class Setup(NamedTuple):
    """A model, the modes it is served in, and what clients ask: prompts, answers (from, to), requests of each."""

    name: str
    vocabulary: int
    modes: dict[str, list[str]]
    prompt: tuple[int, int]
    tokens: tuple[int, int]
    requests: int


def modes_within(expert_memory: str) -> dict[str, list[str]]:
    """Options of `dynaexq serve`, by the mode's name in the table."""
    return {
        "static int2": ["--mode", "static", "--tier", "int2"],
        "uniform": ["--mode", "uniform", "--expert-memory", expert_memory],
        "dynaexq int8/int2": ["--mode", "dynaexq", "--high", "int8", "--low", "int2", "--expert-memory", expert_memory],
        "full": ["--mode", "full"],
    }


EMBEDDED = Setup("embedded", 4000, modes_within("12M"), (32, 128), (32, 64), 3)
QWEN = Setup("qwen3-30b-a3b, 4 layers", 150_000, modes_within("1400M"), (64, 128), (32, 32), 1)


class Server:
    """`dynaexq serve` in a process of its own."""

    def __init__(self, store: Path, mode: list[str]) -> None:
        command = [
            sys.executable, "-m", "dynaexq", "serve", str(store), "--port", "0", "--name", "m", "--slots", "32",
            "--context", "256", "--no-reuse", *mode,
        ]  # fmt: skip
        environment = {**os.environ, "GOMP_SPINCOUNT": "10000"}
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self._process.stderr is not None
        seen = ""
        for line in self._process.stderr:
            seen += line
            if found := re.search(r"listening on http://[^:]+:(\d+)", line):
                self.port = int(found[1])
                return
        raise SystemExit(f"the server did not start:\n{seen}")

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.communicate()


def measure(setup: Setup, store: Path, modes: list[str], clients: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """A row for each mode and number of clients."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as running:
        askers = running.enter_context(contextlib.closing(Clients()))
        servers = {name: running.enter_context(contextlib.closing(Server(store, setup.modes[name]))) for name in modes}
        for turn in range(-1, rounds):
            for count in clients if turn >= 0 else clients[:1]:  # the first turn warms up
                for name, server in servers.items():
                    asked = setup.requests, setup.prompt, setup.tokens
                    result = askers.run(Job(server.port, "m", setup.vocabulary, count, *asked, seed=turn + 1))
                    if turn >= 0:
                        runs.setdefault((name, count), []).append(result)
    return [
        {"model": setup.name, "mode": name, "clients": count, **_summarise(results)}
        for (name, count), results in runs.items()
    ]


def _summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    answers = [answer for result in results for answer in result["answers"]]
    speeds = [sum(answer[3] for answer in result["answers"]) / result["seconds"] for result in results]
    return {
        "answers": len(answers),
        "ttft": _percentiles([answer[0] for answer in answers]),
        "tpot": _percentiles([answer[1] for answer in answers if answer[1] is not None]),
        "seconds": _percentiles([answer[2] for answer in answers]),
        "tokens_per_second": float(np.median(speeds)),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    median, high = np.percentile(seconds, (50, 99)).tolist()
    return {"mean": float(np.mean(seconds)), "p50": median, "p99": high}


def make_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds, P50 / P99, at the numbers of clients in SHOWN."""
    shown = [count for count in SHOWN if any(row["clients"] == count for row in rows)]
    titles = [f"{what}, {count}" for count in shown for what in ("TTFT", "TPOT", "tokens/s")]
    lines = ["| model | mode | " + " | ".join(titles) + " |", "| --- | --- |" + " --: |" * len(titles)]
    for model, mode in dict.fromkeys((row["model"], row["mode"]) for row in rows):
        cells = []
        for count in shown:
            (row,) = (row for row in rows if (row["model"], row["mode"], row["clients"]) == (model, mode, count))
            cells += [f"{1e3 * row[what]['p50']:.0f} / {1e3 * row[what]['p99']:.0f}" for what in ("ttft", "tpot")]
            cells.append(f"{row['tokens_per_second']:.0f}")
        lines.append(f"| {model} | {mode} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def make_stores(directory: Path, quick: bool) -> list[tuple[Setup, Path]]:
    """Prepare what is not there."""
    embedded, random = directory / "embedded", directory / "random"
    options = PrepareOptions(("int2", "int4", "int8", "bf16"), 64, "rtn")
    prepare_store(open_experts(EMBEDDED_MODEL)[1], embedded, options, lambda *_: None)
    if quick:
        return [(EMBEDDED, embedded)]
    synth = [
        "synth",
        "qwen3-30b-a3b",
        "-o",
        str(random),
        "--layers",
        "4",
        "--tiers",
        "int2,int4,int8",
        "--routing",
        "zipf",
    ]
    subprocess.run([sys.executable, "-m", "dynaexq", *synth], check=True)
    return [(EMBEDDED, embedded), (QWEN, random)]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the embedded model, two modes, few clients, one round")
    parser.add_argument("--json", metavar="FILE|-", help="save the result")
    parser.add_argument("--readme", metavar="FILE", help="put the table between its markers")
    parser.add_argument("--directory", metavar="DIR", type=Path, help="keep stores here (default: a temporary place)")
    options = parser.parse_args()
    pin_threads()
    with tempfile.TemporaryDirectory() as temporary:
        rows = []
        for setup, store in make_stores(options.directory or Path(temporary), options.quick):
            chosen = (1, 4) if options.quick else CLIENTS
            modes = list(setup.modes)[1:3] if options.quick else list(setup.modes)
            rows += measure(setup, store, modes, chosen, 1 if options.quick else ROUNDS)
    table = make_table(rows) + "\n\nMilliseconds, P50 / P99, by the number of clients at a time."
    publish({"run": describe_run(), "rows": rows}, table, "serve", options.json, options.readme)


if __name__ == "__main__":
    main()
