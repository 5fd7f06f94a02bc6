"""Whole models against llama.cpp: the same geometry, bits and threads, in turns within one run.

    python -m benchmarks.peers [--quick] [--json FILE|-] [--readme FILE] [--llama-python PYTHON] [--directory DIR]

Random weights, so speed alone. llama.cpp runs in a process of its own under PYTHON, an interpreter with
`llama-cpp-python` and `gguf` (build it with
CMAKE_ARGS="-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF"); llama_decode is called directly, and
on our side the model's forward. Both hold their weights in anonymous memory. Each round times every task on both, one
after the other; the ratio is that of the medians over rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.machine import THREADS, describe_run, pin_threads, publish
from benchmarks.peers_llama import PAST
from dynaexq.integrations.transformers import DynaExqConfig
from dynaexq.integrations.transformers.cache import cache_argument, make_cache
from dynaexq.integrations.transformers.loading import load_model, quiet_transformers
from dynaexq.integrations.transformers.quantizer import runtime_of

VOCABULARY = 4096


class Pair(NamedTuple):
    """Two ways to keep the same model: experts and dense layers of ours, and llama.cpp's type of all matrices."""

    tier: str
    dense: str
    kind: str


class Geometry(NamedTuple):
    """A model both sides can build: our name, and llama.cpp's description."""

    name: str
    layers: int
    description: dict[str, Any]


QWEN = Geometry(
    "qwen3-30b-a3b",
    8,
    {
        "architecture": "qwen3moe", "hidden": 2048, "experts": 128, "heads": 32, "kv_heads": 4, "head_dim": 128,
        "intermediate": 768, "top_k": 8, "query_norm": 128,
    },
)  # fmt: skip
OLMOE = Geometry(
    "olmoe-1b-7b",
    8,
    {
        "architecture": "olmoe", "hidden": 2048, "experts": 64, "heads": 16, "kv_heads": 16, "head_dim": 128,
        "intermediate": 1024, "top_k": 8, "query_norm": 2048,
    },
)  # fmt: skip
BITS = {"int2": 2.5, "int4": 4.5, "int8": 8.25, "Q2_K": 2.625, "Q4_0": 4.5, "Q8_0": 8.5}
PAIRS = (
    Pair("int4", "int4", "Q4_0"),
    Pair("int4", "int8", "Q4_0"),
    Pair("int2", "int4", "Q2_K"),
    Pair("int8", "int8", "Q8_0"),
)
PREFILLS, STREAMS = (128, 512), (1, 4, 8, 16, 32)
STEPS = {1: 24, 4: 8, 8: 6, 16: 4, 32: 4}
ROUNDS = 5


class Ours:
    """A loaded model of ours, with llama.cpp's tasks."""

    def __init__(self, store: Path, pair: Pair) -> None:
        config = DynaExqConfig(mode="static", tier=pair.tier, dense=pair.dense)
        self.model = load_model(store, config, torch.float32)
        self.argument = cache_argument(self.model)

    def _forward(self, cache: Any, streams: int, tokens: int) -> float:
        ids = torch.randint(0, VOCABULARY, (streams, tokens))
        start = time.perf_counter()
        with torch.inference_mode():
            self.model(ids, **{self.argument: cache}, logits_to_keep=1)
        return time.perf_counter() - start

    def prefill(self, tokens: int) -> float:
        """Seconds of a prompt of `tokens`, logits of its last token."""
        return self._forward(make_cache(self.model.config, tokens), 1, tokens)

    def decode(self, streams: int, steps: int) -> float:
        """Seconds of one step of `streams` sequences, median of `steps`, each with PAST tokens behind it."""
        cache = make_cache(self.model.config, PAST + steps)
        self._forward(cache, streams, PAST)
        return float(np.median([self._forward(cache, streams, 1) for _ in range(steps)]))


class Peer:
    """llama.cpp behind a pipe."""

    def __init__(self, python: str, file: Path) -> None:
        command = [python, str(Path(__file__).parent / "peers_llama.py"), "serve", str(file), str(THREADS)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._read() == "ready"

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit("llama.cpp ended early; see its message above")
        return line

    def run(self, task: str) -> float:
        """Seconds of `prefill N` or `decode STREAMS STEPS`."""
        assert self.process.stdin is not None
        self.process.stdin.write(task + "\n")
        self.process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(ours: Ours, peer: Peer, prefills: tuple[int, ...], streams: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Tokens per second of both on every task, the ratio of medians, and its range over rounds."""
    tasks = [f"prefill {tokens}" for tokens in prefills] + [f"decode {count} {STEPS[count]}" for count in streams]
    times: dict[str, list[tuple[float, float]]] = {task: [] for task in tasks}
    for task in tasks:  # once unmeasured: pages, buffers, threads
        peer.run(task), _run_ours(ours, task)
    for number in range(rounds):
        for task in tasks:
            first = peer.run(task) if number % 2 else 0.0
            mine = _run_ours(ours, task)
            times[task].append((mine, first or peer.run(task)))
    rows = {}
    for task in tasks:
        mine, theirs = np.array(times[task]).T
        tokens = int(task.split()[1])
        rows[" ".join(task.split()[:2])] = {
            "ours": float(tokens / np.median(mine)),
            "llama.cpp": float(tokens / np.median(theirs)),
            "ratio": float(np.median(theirs) / np.median(mine)),
            "ratio_range": [float((theirs / mine).min()), float((theirs / mine).max())],
        }
    return rows


def _run_ours(ours: Ours, task: str) -> float:
    what, *numbers = task.split()
    seconds: float = getattr(ours, what)(*map(int, numbers))
    return seconds


def prepare(geometry: Geometry, layers: int, tiers: list[str], kinds: list[str], python: str, root: Path) -> Path:
    """Write the store and the GGUF files that are not there yet; returns the store."""
    store = root / f"{geometry.name}-{layers}"
    subprocess.run(
        [sys.executable, "-m", "dynaexq", "synth", geometry.name, "--layers", str(layers), "--vocab", str(VOCABULARY),
         "--tiers", ",".join(tiers), "-o", str(store)],
        check=True, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    description = root / f"{geometry.name}.json"
    description.write_text(json.dumps({**geometry.description, "layers": layers, "vocab": VOCABULARY}))
    for kind in kinds:
        file = gguf_path(root, geometry, layers, kind)
        if not file.exists():
            partial = file.with_suffix(".partial")
            script = str(Path(__file__).parent / "peers_llama.py")
            subprocess.run([python, script, "write", str(description), kind, str(partial)], check=True)
            partial.rename(file)
    return store


def gguf_path(root: Path, geometry: Geometry, layers: int, kind: str) -> Path:
    """Where llama.cpp's form of a geometry lies."""
    return root / f"{geometry.name}-{layers}-{kind}.gguf"


def measure(python: str, root: Path, quick: bool) -> list[dict[str, Any]]:
    """Every pair of every geometry, the first with all tasks."""
    results = []
    geometries = [(QWEN, 2, PAIRS[:1])] if quick else [(QWEN, QWEN.layers, PAIRS), (OLMOE, OLMOE.layers, PAIRS[:1])]
    for geometry, layers, pairs in geometries:
        tiers, kinds = sorted({pair.tier for pair in pairs}), sorted({pair.kind for pair in pairs})
        store = prepare(geometry, layers, tiers, kinds, python, root)
        for pair in pairs:
            ours, peer = Ours(store, pair), Peer(python, gguf_path(root, geometry, layers, pair.kind))
            first = not results and not quick
            tasks = (PREFILLS, STREAMS) if first else (PREFILLS[:1], (1, 8) if quick else (1, 8, 32))
            rows = compare(ours, peer, *tasks, 3 if quick else ROUNDS)
            peer.close()
            fused = runtime_of(ours.model).fused_layers
            results.append(
                {"geometry": geometry.name, "layers": layers, **pair._asdict(), "fused": fused, "rows": rows}
            )
            print(format_results(results[-1:]), file=sys.stderr)
            del ours
            gc.collect()  # a model is full of cycles
    return results


def format_results(results: list[dict[str, Any]]) -> str:
    """A Markdown table: tokens per second, ours / llama.cpp, and the ratio."""
    names = list(results[0]["rows"])
    lines = [
        "| geometry | experts, dense (bits/weight) | llama.cpp | " + " | ".join(names) + " |",
        "| --- | --- | --- |" + " --: |" * len(names),
    ]
    for each in results:
        cells = [
            f"{row['ours']:.0f} / {row['llama.cpp']:.0f} = **{row['ratio']:.2f}** "
            f"[{row['ratio_range'][0]:.2f}, {row['ratio_range'][1]:.2f}]"
            if (row := each["rows"].get(name))
            else ""
            for name in names
        ]
        ours = f"{each['tier']} ({BITS[each['tier']]}), {each['dense']} ({BITS[each['dense']]})"
        peer = f"{each['kind']} ({BITS[each['kind']]})"
        lines.append(f"| {each['geometry']}, {each['layers']} layers | {ours} | {peer} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers, one pair, three tasks")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    parser.add_argument("--readme", metavar="FILE", help="put the table between the markers of this file")
    parser.add_argument("--llama-python", metavar="PYTHON", default=sys.executable, help="default: this interpreter")
    parser.add_argument("--directory", type=Path, help="keep models here (22 GB in the full form); default: nowhere")
    arguments = parser.parse_args()
    probe = [arguments.llama_python, "-c", "import gguf, llama_cpp; print(llama_cpp.__version__)"]
    found = subprocess.run(probe, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{arguments.llama_python} has no llama-cpp-python and gguf; see --help")
    pin_threads()
    quiet_transformers()
    with tempfile.TemporaryDirectory() as scratch:
        root = arguments.directory or Path(scratch)
        root.mkdir(parents=True, exist_ok=True)
        results = measure(arguments.llama_python, root, arguments.quick)
    run = {**describe_run(), "command": "python -m benchmarks.peers" + " --quick" * arguments.quick}
    result = {"run": {**run, "llama-cpp-python": found.stdout.strip()}, "results": results}
    publish(result, format_results(results), "peers", arguments.json, arguments.readme)


if __name__ == "__main__":
    main()
