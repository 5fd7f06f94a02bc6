"""How near the simulator comes to the engine, and how fast it is.

    python -m benchmarks.simulator [--quick] [--json FILE|-] [--readme FILE]

Nearness: the embedded model answers prompts, some at a time, once at each of two uniform tiers, recorded; costs are
fitted to those two traces. Other configurations are then simulated from the first trace, and run for real.

Speed: a made-up trace of 48 layers of 128 experts whose workload shifts once, tokens of the trace per second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import THREADS, describe_run, pin_threads, publish
from benchmarks.workloads import SHIPPED
from dynaexq.evaluate import read_documents
from dynaexq.integrations.transformers.loading import open_experts, quiet_transformers
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.launch_options import LaunchOptions
from dynaexq.llm import LLM
from dynaexq.simulate.conditions import fit_to_traces
from dynaexq.simulate.costs import Line, StepCosts
from dynaexq.simulate.options import SimulationOptions
from dynaexq.simulate.report import simulate
from dynaexq.simulate.trace_source import open_source
from dynaexq.store import PrepareOptions, prepare_store
from dynaexq.traffic.trace import TraceHead, TraceReader
from dynaexq.traffic.trace_edit import write_trace
from dynaexq.traffic.trace_synthetic import SyntheticTraffic, draw_trace
from dynaexq.tuning import GIGABYTE

MIB = 1 << 20
SLOTS, PROMPT, ANSWER = 4, 200, 64
SLOW_LINK = 0.02
"""GB/s: so slow that waits show."""

CASES: dict[str, dict[str, Any]] = {
    "static int8": {"mode": "static", "tier": "int8"},
    "dynaexq 12 MiB": {"mode": "dynaexq", "high": "int8", "low": "int2", "expert_memory": 12 * MIB},
    "dynaexq 8 MiB": {"mode": "dynaexq", "high": "int8", "low": "int2", "expert_memory": 8 * MIB},
    "blocking 12 MiB, slow link": {
        "mode": "blocking", "high": "int8", "low": "int2", "expert_memory": 12 * MIB, "tune": {"link_gbps": SLOW_LINK},
    },
    "dynaexq 12 MiB, slow link": {
        "mode": "dynaexq", "high": "int8", "low": "int2", "expert_memory": 12 * MIB, "tune": {"link_gbps": SLOW_LINK},
    },
}  # fmt: skip
MOVING = SimulationOptions("dynaexq", high="int8", low="int2", expert_memory=14 << 30, link=2e9)
GEOMETRY = TraceHead(model="synthetic", layers=48, experts=128, top_k=8, hidden=2048, intermediate=768)


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few prompts, few tokens")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    parser.add_argument("--readme", metavar="FILE", help="replace the table between the markers of this file")
    arguments = parser.parse_args()
    pin_threads()
    quiet_transformers()
    with tempfile.TemporaryDirectory() as directory:
        result = {
            "run": describe_run(),
            "cases": measure_nearness(Path(directory), 8 if arguments.quick else 48),
            "speed": measure_speed(Path(directory), 8_000 if arguments.quick else 200_000),
        }
    publish(result, render(result), "simulator", arguments.json, arguments.readme)


def measure_nearness(directory: Path, prompts: int) -> dict[str, Any]:
    """Seconds, waits and shares of every case, simulated and real."""
    store = directory / "store"
    prepare_store(open_experts(EMBEDDED_MODEL)[1], store, PrepareOptions(("int2", "int4", "int8"), 64), lambda *_: None)
    texts = [*read_documents(SHIPPED / "english_heldout.txt"), *read_documents(SHIPPED / "gsm8k_test.jsonl")]
    paths = [directory / f"{tier}.parquet" for tier in ("int4", "int2")]
    for path, tier in zip(paths, ("int4", "int2"), strict=True):
        run_engine(store, LaunchOptions(mode="static", tier=tier), texts, prompts, path)
    costs = fit_to_traces(paths, None)
    found = {}
    for name, options in CASES.items():
        print(name, file=sys.stderr)
        real = run_engine(store, LaunchOptions(**options), texts, prompts, directory / "real.parquet")
        reader = TraceReader.open(paths[0])
        drag = 0.0 if options["mode"] == "static" else 1 / THREADS
        chosen = SimulationOptions(**options, link=real["link"], drag=drag)
        report = simulate(open_source(reader.head, store, None), chosen, costs, reader)
        reader.close()
        simulated = {
            "seconds": report.seconds,
            "tokens": report.tokens,
            "waits": report.wait_seconds,
            "raised": report.raised,
        }
        found[name] = {"real": real, "simulated": simulated}
    return {"costs": costs.model_dump(), "cases": found}


def run_engine(store: Path, options: LaunchOptions, texts: list[str], prompts: int, trace: Path) -> dict[str, float]:
    """Answer prompts, SLOTS at a time; seconds are those of passes and waits."""
    options = LaunchOptions(**{**vars(options), "trace": trace})
    with LLM(str(store), slots=SLOTS, context=PROMPT + ANSWER + 1, options=options) as llm:
        runtime = llm.launch.runtime
        tokens = llm.encoder.encode("\n\n".join(texts)[: 8 * PROMPT * prompts])
        llm.encoder.stop_tokens = frozenset()  # answers of one length
        count = min(prompts, len(tokens) // PROMPT)
        streams = [llm.submit(tokens[PROMPT * each : PROMPT * (each + 1)], ANSWER) for each in range(count)]
        for stream in streams:
            stream.wait()
        pace = runtime.control.signals.pace if runtime.control else None
        raised, waits = runtime.hot_share_high, runtime.counters.wait_seconds
    reader = TraceReader.open(trace)
    seconds: dict[int, float] = {}
    for rows in reader.batches():
        seconds |= dict(zip(rows.window.tolist(), rows.seconds.tolist(), strict=True))
    reader.close()
    link = pace.link if pace else options.tune.get("link_gbps", 1.0) * GIGABYTE
    return {
        "seconds": sum(seconds.values()) + waits,
        "tokens": reader.tokens,
        "waits": waits,
        "raised": raised,
        "link": link,
    }


def measure_speed(directory: Path, tokens: int) -> dict[str, float]:
    """Tokens of a trace per second, by batch and what moves."""
    costs = StepCosts(decode=Line(start=0.005, byte=1e-12), prefill=Line(start=0.01, token=1e-3))
    found = {}
    for batch in (1, 8):
        path = directory / f"batch{batch}.parquet"
        traffic = SyntheticTraffic(tokens, zipf=1.0, shift_every=tokens // 2, batch=batch)
        write_trace(path, GEOMETRY, draw_trace(GEOMETRY, traffic), weights=False)
        for name, options in (
            ("static", SimulationOptions("static", tier="int4")),
            ("dynaexq", MOVING),
        ):
            reader = TraceReader.open(path)
            source = open_source(reader.head, None, None)
            start = time.perf_counter()
            simulate(source, options, costs, reader)
            found[f"{name}, batch {batch}"] = tokens / (time.perf_counter() - start)
            reader.close()
            print(name, batch, file=sys.stderr)
    return found


def render(result: dict[str, Any]) -> str:
    """Both tables."""
    lines = [
        "| case | seconds | simulated | error | waits | simulated | above the lowest tier | simulated |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    errors = []
    for name, case in result["cases"]["cases"].items():
        real, simulated = case["real"], case["simulated"]
        speed = (simulated["tokens"] / simulated["seconds"]) / (real["tokens"] / real["seconds"]) - 1
        errors.append(abs(speed))
        cells = [f"{real['seconds']:.2f}", f"{simulated['seconds']:.2f}", f"{100 * speed:+.1f} %"]
        cells += [f"{each['waits']:.2f}" for each in (real, simulated)]
        cells += [f"{100 * each['raised']:.1f} %" for each in (real, simulated)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    fit = result["cases"]["costs"]["error"]
    median = 100 * float(np.median(errors))
    lines += [
        "",
        f"The error is that of tokens per second: median {median:.1f} %. Costs were fitted to traces of int4 and int2; "
        f"passes are off by {100 * fit['decode']:.1f} % (decode) and {100 * fit['prefill']:.1f} % (prompts) in the "
        "median.",
        "",
        "Tokens of a trace of 48 layers of 128 experts that are simulated a second: "
        + "; ".join(f"{name}: {value:,.0f}" for name, value in result["speed"].items())
        + f" (times {48 * 8} router choices each).",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
