"""Planned memory against the peak of real runs, each in a process of its own.

    python -m benchmarks.planner [--quick] [--store DIR] [--json FILE|-] [--readme FILE]

A few layers of a 30B geometry at random weights (made once, in --store if it is given), and the embedded model. Every
run fills its context: a prompt as long as it goes for every slot, then some tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import describe_run, pin_threads, publish
from dynaexq.launch import EMBEDDED_MODEL

MIB = 1 << 20
ANSWER = 4


class Case(NamedTuple):
    """One run: a model, its context and slots, and options of LaunchOptions."""

    model: str
    context: int
    slots: int
    options: dict[str, Any]


def list_cases(store: str, quick: bool) -> list[Case]:
    """All cases, or the few of the quick form."""
    int4, int2 = {"mode": "static", "tier": "int4"}, {"mode": "static", "tier": "int2"}
    moving = {"mode": "dynaexq", "high": "int4", "low": "int2", "expert_memory": 900 * MIB}
    own = {"mode": "dynaexq", "expert_memory": 12 * MIB}
    small = [
        Case(str(EMBEDDED_MODEL), 512, 1, own),
        Case(str(EMBEDDED_MODEL), 1024, 16, own),
        Case(str(EMBEDDED_MODEL), 1024, 64, {"mode": "full"}),
    ]
    if quick:
        return small[:2]
    return [
        *small,
        Case(store, 1024, 1, int4),
        Case(store, 1024, 1, {**int4, "dense": "full"}),
        Case(store, 1024, 1, {**int4, "dense": "int4"}),
        Case(store, 1024, 1, int2),
        Case(store, 1024, 1, {**int4, "dtype": "bfloat16"}),
        Case(store, 8192, 1, int2),
        Case(store, 16384, 1, int2),
        Case(store, 2048, 16, int2),
        Case(store, 4096, 8, moving),
        Case(store, 1024, 32, moving),
    ]


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two runs of the embedded model")
    parser.add_argument("--store", type=Path, help="where the random model is, or is to be")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    parser.add_argument("--readme", metavar="FILE", help="replace the table between the markers of this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        store = arguments.store or Path(directory) / "store"
        if not arguments.quick:
            command = ["synth", "qwen3-30b-a3b", "-o", str(store), "--layers", "4", "--vocab", "32768"]
            subprocess.run([sys.executable, "-m", "dynaexq", *command, "--tiers", "int4,int2"], check=True)
        rows = []
        for case in list_cases(str(store), arguments.quick):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(measure, (case,)))
            print(rows[-1], file=sys.stderr)
    result = {"run": describe_run(), "cases": rows}
    publish(result, render(result), "planner", arguments.json, arguments.readme)


def measure(case: Case) -> dict[str, Any]:
    """Plan and peak of one run, in bytes."""
    from dynaexq.kernels.threads import limit_torch_threads  # noqa: PLC0415
    from dynaexq.llm import LLM  # noqa: PLC0415 (a process of its own pays for nothing else)
    from dynaexq.native import limit_malloc  # noqa: PLC0415
    from dynaexq.plan.process import peak_resident_bytes  # noqa: PLC0415

    limit_malloc()  # as the command line does
    limit_torch_threads()
    pin_threads()
    with LLM(case.model, context=case.context, slots=case.slots, **case.options) as llm:
        words = llm.encoder.encode("There are many boxes with coins in them, and nobody counts. " * (case.context // 8))
        prompt = words[: case.context - ANSWER - 1]
        streams = [llm.submit((*prompt[:-1], prompt[each]), ANSWER) for each in range(case.slots)]
        for stream in streams:
            stream.wait()
        plan = llm.launch.plan
    name = "embedded" if case.model == str(EMBEDDED_MODEL) else "4 layers of 30B"
    shown = {**case.options}
    if "expert_memory" in shown:
        shown["expert_memory"] = f"{shown['expert_memory'] // MIB} MiB"
    return {
        "model": name,
        "options": ", ".join(map(str, shown.values())),
        "context": case.context,
        "slots": case.slots,
        "planned": plan.total,
        "peak": peak_resident_bytes(),
        "fixed": plan.fixed,
        "experts": plan.expert_bytes,
    }


def render(result: dict[str, Any]) -> str:
    """The table."""
    lines = ["| model | options | context | slots | planned MiB | peak MiB | peak / plan |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|")
    for row in result["cases"]:
        planned, peak = row["planned"], row["peak"]
        lines.append(
            f"| {row['model']} | {row['options']} | {row['context']:,} | {row['slots']} | {planned / MIB:,.0f} | "
            f"{peak / MIB:,.0f} | {100 * peak / planned:.1f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
