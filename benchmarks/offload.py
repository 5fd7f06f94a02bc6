"""What caches of experts that read on need make of a workload: hits, beside the bound that none beats.

    python -m benchmarks.offload [--quick] [--json FILE|-] [--readme FILE]

The embedded model answers prompts from text, mathematics and code, one and eight at a time, recorded; caches of all
sizes are then simulated over both traces. The engine's own hits and misses are the same (tests/simulate/test_cache.py).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_run, pin_threads, publish
from benchmarks.workloads import SHIPPED
from dynaexq.evaluate import read_documents
from dynaexq.formats import VersionLayout
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import EMBEDDED_MODEL, Opened
from dynaexq.llm import LLM
from dynaexq.simulate.cache import CACHES
from dynaexq.simulate.costs import Line, StepCosts
from dynaexq.simulate.options import SimulationOptions
from dynaexq.simulate.report import simulate
from dynaexq.simulate.trace_source import open_source
from dynaexq.traffic.trace import TraceReader

FILES = ("english_heldout.txt", "gsm8k_test.jsonl", "humaneval.jsonl")
SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
STREAMS = (1, 8)
PROMPT, ANSWER = 64, 64
TIER, COSTS = "int4", StepCosts(decode=Line(start=0.001), prefill=Line(start=0.001))
"""Neither changes who is resident."""


def main() -> None:
    """Record, simulate, and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few prompts, two sizes")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    parser.add_argument("--readme", metavar="FILE", help="replace the table between the markers of this file")
    arguments = parser.parse_args()
    pin_threads()
    quiet_transformers()
    prompts, shares = (2, (0.3, 0.7)) if arguments.quick else (16, SHARES)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for streams in STREAMS:
            path = Path(directory) / f"{streams}.parquet"
            record(path, streams, prompts)
            reader = TraceReader.open(path)
            for share in shares:
                rows.append({"streams": streams, "share": share, "hits": measure(reader, share)})
    result: dict[str, Any] = {"run": describe_run(), "prompts": prompts * len(FILES), "rows": rows}
    publish(result, render(result), "offload", arguments.json, arguments.readme)


def record(path: Path, streams: int, prompts: int) -> None:
    """Answer prompts of all files in turn, so many at a time."""
    with LLM(Opened(str(EMBEDDED_MODEL)), slots=streams, context=PROMPT + ANSWER + 1, mode="full", trace=path) as llm:
        length = 8 * PROMPT * prompts
        texts = [llm.encoder.encode("\n\n".join(read_documents(SHIPPED / name))[:length]) for name in FILES]
        parts = [text[PROMPT * each : PROMPT * (each + 1)] for each in range(prompts) for text in texts]
        for stream in [llm.submit(part, ANSWER) for part in parts]:
            stream.wait()


def measure(reader: TraceReader, share: float) -> dict[str, float]:
    """Share of needs that each policy's cache of so many experts meets."""
    source, found = open_source(reader.head, None, None), {}
    shape = source.shape
    nbytes = VersionLayout.of(source.format(TIER), shape.expert).extent_bytes
    memory = round(share * shape.layers * shape.experts) * nbytes
    for name in CACHES:
        cache = simulate(source, SimulationOptions(name, tier=TIER, expert_memory=memory), COSTS, reader).cache
        assert cache is not None
        found[name] = cache["hit_rate"]
    return found


def render(result: dict[str, Any]) -> str:
    """The table."""
    names = list(result["rows"][0]["hits"])
    lines = [f"| streams | experts resident | {' | '.join(names)} |", f"|--:|--:|{'--:|' * len(names)}"]
    for row in result["rows"]:
        cells = " | ".join(f"{100 * row['hits'][name]:.1f} %" for name in names)
        lines.append(f"| {row['streams']} | {100 * row['share']:.0f} % | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
