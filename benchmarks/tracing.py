"""What recording a run costs: tokens per second of the embedded model with and without, in turns.

    python -m benchmarks.tracing [--quick] [--json FILE|-]

Decode: streams that run together, 64 tokens each. Prompts: one of 512 tokens at a time. Medians over rounds;
processor time, of all threads, is what other work on the machine disturbs least. "By itself" is the processor time
of the recording's own code, over the time of the runs: what to go by where two runs of the same differ by more.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_run, pin_threads, save
from benchmarks.workloads import SHIPPED
from dynaexq.evaluate import read_documents
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import EMBEDDED_MODEL, Opened
from dynaexq.llm import LLM
from dynaexq.traffic.recorder import ClosedWindow
from dynaexq.traffic.trace_recorder import TraceRecorder

STREAMS, TOKENS, PROMPT = (1, 8), 64, 512


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 31")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    arguments = parser.parse_args()
    pin_threads()
    quiet_transformers()
    rounds = 5 if arguments.quick else 31
    opened = Opened(str(EMBEDDED_MODEL))
    with (
        tempfile.TemporaryDirectory() as directory,
        LLM(opened, slots=max(STREAMS), context=PROMPT + TOKENS, mode="dynaexq", expert_memory="12M") as llm,
    ):
        tokens = llm.encoder.encode("\n\n".join(read_documents(SHIPPED / "english_heldout.txt"))[:20_000])

        def decode(streams: int) -> Callable[[], int]:
            def run() -> int:
                running = [llm.submit(tokens[16 * each : 16 * each + 16], TOKENS) for each in range(streams)]
                return sum(len(stream.wait().tokens) for stream in running)

            return run

        def prefill() -> int:
            llm.score(tokens[:PROMPT], PROMPT - 1)
            return PROMPT

        tasks = {f"decode {count}": decode(count) for count in STREAMS} | {f"prompt {PROMPT}": prefill}
        found = {name: _compare(llm, opened, task, rounds, Path(directory)) for name, task in tasks.items()}
    result: dict[str, Any] = {"run": describe_run(), "rounds": rounds, "tasks": found}
    save(result, arguments.json)
    if arguments.json != "-":
        for name, each in found.items():
            print(
                f"{name}: {each['plain']:.0f} tokens/s, recorded {each['recorded']:.0f}, "
                f"{100 * (1 - each['ratio']):+.1f} % (median of pairs); "
                f"{100 * (each['processor'] - 1):+.1f} % processor time; {100 * each['own']:.2f} % by itself"
            )


class _TimedRecorder(TraceRecorder):
    """Adds up the processor time of its own."""

    own = 0.0

    def after_window(self, window: ClosedWindow) -> None:
        start = time.thread_time()
        super().after_window(window)
        self.own += time.thread_time() - start

    def _write(self, windows: list[ClosedWindow]) -> None:
        start = time.thread_time()
        super()._write(windows)
        self.own += time.thread_time() - start


def _compare(llm: LLM, opened: Opened, task: Callable[[], int], rounds: int, directory: Path) -> dict[str, float]:
    speeds: dict[bool, list[float]] = {False: [], True: []}
    costs: dict[bool, list[float]] = {False: [], True: []}
    runtime = llm.launch.runtime
    recorder = _TimedRecorder(directory / "trace.parquet", "", opened.fingerprint, runtime.experts)
    runtime.trace = recorder
    task()
    recorder.own = 0.0  # without what the first window starts
    for number in range(2 * rounds):
        recorded = (number % 4) in (1, 2)  # neither is always the first of a pair
        runtime.trace = recorder if recorded else None
        start, busy = time.perf_counter(), time.process_time()
        tokens = task()
        speeds[recorded].append(tokens / (time.perf_counter() - start))
        costs[recorded].append((time.process_time() - busy) / tokens)
    runtime.trace = None
    recorder.close()
    taken = sum(1 / speed for speed in speeds[True]) * tokens
    pairs = zip(speeds[True], speeds[False], strict=True)
    return {
        "plain": statistics.median(speeds[False]),
        "recorded": statistics.median(speeds[True]),
        "ratio": statistics.median(one / other for one, other in pairs),
        "processor": statistics.median(costs[True]) / statistics.median(costs[False]),
        "own": recorder.own / taken,
    }


if __name__ == "__main__":
    main()
