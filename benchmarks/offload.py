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

import numpy as np

from benchmarks.machine import describe_run, pin_threads, publish
from benchmarks.workloads import SHIPPED
from dynaexq.core import ExpertShape, ModelShape
from dynaexq.evaluate import read_documents
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import EMBEDDED_MODEL, Opened
from dynaexq.llm import LLM
from dynaexq.policy.caching import CacheMap
from dynaexq.simulate.cache import CACHES, SimulatedCache, make_policy
from dynaexq.simulate.feed import Block, read_blocks
from dynaexq.traffic.trace import TraceReader

FILES = ("english_heldout.txt", "gsm8k_test.jsonl", "humaneval.jsonl")
SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
STREAMS = (1, 8)
PROMPT, ANSWER = 64, 64


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
            blocks = list(read_blocks(reader))
            for share in shares:
                rows.append({"streams": streams, "share": share, "hits": measure(reader, blocks, share)})
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


def measure(reader: TraceReader, blocks: list[Block], share: float) -> dict[str, float]:
    """Share of needs that each policy's cache of so many experts meets."""
    head, found = reader.head, {}
    size = head.layers * head.experts
    shape = ModelShape(head.layers, head.experts, ExpertShape(head.hidden, head.intermediate))
    for name in CACHES:
        policy = make_policy(name, shape, lambda: blocks)
        cache = SimulatedCache(shape, CacheMap(size, round(share * size), policy), 1, 1.0, 0.0)
        for block in blocks:
            for begin, end in zip([0, *block.ends[:-1].tolist()], block.ends.tolist(), strict=True):
                cache.run(np.bincount(block.places[begin:end].ravel(), minlength=size))
        found[name] = cache.map.describe()["hit_rate"]
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
