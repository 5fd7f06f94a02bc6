"""Online precision against static maps at equal bytes, on the embedded model.

    python -m benchmarks.adaptive [--quick] [--texts DIR] [--jobs N] [--json FILE|-] [--readme FILE]

A stream of three workloads (text, then math, then code) goes through every variant, one window set per forward pass and
one update of the high set after each. Per cell (tiers, share of experts that can be high) all variants have the same
bytes. Loss, KL to bf16 and paired differences, 95 % intervals by bootstrap over documents.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.adaptive_report import render
from benchmarks.adaptive_stream import Stream, score_models
from benchmarks.machine import THREADS, describe_run, publish
from benchmarks.spread import make_parser, run_in_processes
from benchmarks.workloads import Workload, read_workloads
from dynaexq.evaluate.divergence import Scores
from dynaexq.formats import DEFAULT_QUANTIZER, VersionLayout, tier_rank
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.loading import load_model, load_tokenizer, open_experts, quiet_transformers
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.residency.layout import default_spare
from dynaexq.store import ExpertStore, PrepareOptions, prepare_store
from dynaexq.traffic import TrafficMeter, TrafficProfile

TOKENS, BATCH = 512, 4
PASSES = 34
"""Forward passes, and updates, of each phase; with BATCH windows of TOKENS tokens each: 69,632 tokens a phase."""

UNIFORM = ("int1", "int2", "int4", "int8", "bf16")
SHARES = {
    ("bf16", "int1"): (0.1, 0.25),
    ("int4", "int1"): (0.05, 0.1, 0.25, 0.5, 0.75),
    ("int4", "int2"): (0.25, 0.5, 0.75),
}
EXTRA_AT = 0.25
"""The share at which the other layout and faster forgetting are run, too."""


class Cell(NamedTuple):
    """One comparison: tiers, the share of experts that can be high, quantiser of the store."""

    high: str
    low: str
    share: float
    quantizer: str

    @property
    def name(self) -> str:
        """For people and for JSON."""
        suffix = "" if self.quantizer == DEFAULT_QUANTIZER else f" ({self.quantizer})"
        return f"{self.high}/{self.low}{suffix} {100 * self.share:g} %"


CELLS = [Cell(*pair, share, DEFAULT_QUANTIZER) for pair, shares in SHARES.items() for share in shares]
QUICK_CELLS = [Cell("int4", "int1", 0.5, "rtn")]


class Job(NamedTuple):
    """What one process computes."""

    cells: list[Cell]
    stores: dict[str, Path]
    texts: Path | None
    passes: int
    batch: int
    threads: int


def main() -> None:
    """Run the comparison."""
    arguments = make_parser(__doc__, "one cell with rtn, two passes a phase").parse_args()
    quiet_transformers()
    cells = QUICK_CELLS if arguments.quick else CELLS
    passes, batch = (2, 1) if arguments.quick else (PASSES, BATCH)
    with tempfile.TemporaryDirectory() as directory:
        stores = _prepare(Path(directory), cells)
        jobs = min(arguments.jobs, len(cells))
        parts = [Job(cells[n::jobs], stores, arguments.texts, passes, batch, THREADS // jobs) for n in range(jobs)]
        results = run_in_processes(compare, parts)
    found = {name: cell for result in results for name, cell in result["cells"].items()}
    result = {
        "run": describe_run(),
        "passes": passes,
        "tokens_per_pass": batch * (TOKENS - 1),
        "files": results[0]["files"],
        "documents": results[0]["documents"],
        "full": results[0]["full"],
        "cells": {cell.name: found[cell.name] for cell in cells},
    }
    publish(result, render(result), "adaptive", arguments.json, arguments.readme)


def compare(job: Job) -> dict[str, Any]:
    """All variants of the job's cells over the whole stream."""
    torch.set_num_threads(job.threads)
    quiet_transformers()
    workloads = read_workloads(load_tokenizer(EMBEDDED_MODEL), job.texts, job.passes * job.batch, TOKENS)
    any_store = next(iter(job.stores.values()))  # bf16 is the same in all
    reference = load_model(any_store, DynaExqConfig(mode="full", kernel="reference"), torch.float32)
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        profiles = write_profiles(reference, workloads, any_store, Path(directory))
        for quantizer, tier in sorted({(cell.quantizer, tier) for cell in job.cells for tier in _uniforms(cell, job)}):
            config = DynaExqConfig(mode="static", tier=tier, kernel="reference")
            models[f"{quantizer} {tier}"] = load_model(job.stores[quantizer], config, torch.float32)
        for cell in job.cells:
            for name, config in _variants(cell, job.stores[cell.quantizer], profiles).items():
                models[f"{cell.name} {name}"] = load_model(job.stores[cell.quantizer], config, torch.float32)
    scores, moved = score_models(reference, models, workloads, job.batch, f"{job.cells[0].name} and more")
    stream = Stream(workloads, job.batch)
    return {
        "files": {name: each.files for name, each in workloads.items()},
        "documents": {name: len(set(each.documents)) for name, each in workloads.items()},
        "full": stream.summary(scores["reference"]),
        "cells": {
            cell.name: _describe(cell, ExpertStore.open(job.stores[cell.quantizer]), stream, scores, models, moved)
            for cell in job.cells
        },
    }


def _describe(
    cell: Cell,
    opened: ExpertStore,
    stream: Stream,
    scores: dict[str, Scores],
    models: dict[str, Any],
    moved: dict[str, list[int]],
) -> dict[str, Any]:
    mine = {name.removeprefix(f"{cell.name} "): each for name, each in scores.items() if name.startswith(cell.name)}
    budget, uniform = _budget(cell, opened), _uniform(cell, opened)
    fixed = {"static low": f"{cell.quantizer} {cell.low}", "uniform": f"{cell.quantizer} {uniform}"}
    high = "reference" if cell.high == "bf16" else f"{cell.quantizer} {cell.high}"
    mine |= {name: scores[key] for name, key in {**fixed, "all high": high}.items()}
    online = {name: models[f"{cell.name} {name}"] for name in mine if f"{cell.name} {name}" in models}
    return {
        "bytes": budget,
        "uniform_tier": uniform,
        "expert_bytes": {name: runtime_of(model).experts.expert_bytes for name, model in online.items()},
        "quality": {name: stream.summary(each) for name, each in mine.items()},
        "against": {name: stream.paired(mine["dynaexq"], each) for name, each in mine.items() if name != "dynaexq"},
        "moved_by_pass": {
            name: moved[f"{cell.name} {name}"] for name in online if moved[f"{cell.name} {name}"][-1] > 0
        },
        "promotions": {name: runtime_of(model).counters.promotions for name, model in online.items()},
        "hot_share_high": {name: runtime_of(model).hot_share_high for name, model in online.items()},
        "kl_by_pass": {name: kl_by_pass(each, stream.batch) for name, each in mine.items()},
    }


def kl_by_pass(scores: Scores, batch: int) -> list[float]:
    """KL per token of each forward pass."""
    _, divergences, tokens = scores.arrays()
    starts = np.arange(0, len(tokens), batch)
    kl: list[float] = (np.add.reduceat(divergences, starts) / np.add.reduceat(tokens, starts)).tolist()
    return kl


def _variants(cell: Cell, store: Path, profiles: dict[str, Path]) -> dict[str, DynaExqConfig]:
    memory = _budget(cell, ExpertStore.open(store))
    common: dict[str, Any] = {"high": cell.high, "low": cell.low, "expert_memory": memory, "kernel": "reference"}

    def online(**tuning: Any) -> DynaExqConfig:
        return DynaExqConfig(mode="dynaexq", drive="replay", tuning=tuning, **common)

    maps = {
        f"map of {name}": DynaExqConfig(mode="static-map", profile=str(path), **common)
        for name, path in profiles.items()
    }
    extra = {"alpha 0.5": online(alpha=0.5), "signal mass": online(signal="mass"), "layout keep": online(layout="keep")}
    return {
        **maps,
        "dynaexq": online(),
        "no-hysteresis": online(margin=0.0),
        **(extra if cell.share == EXTRA_AT else {}),
    }


def _size(opened: ExpertStore, tier: str) -> int:
    return VersionLayout.of(opened.format(tier), opened.shape.expert).extent_bytes


def _budget(cell: Cell, opened: ExpertStore) -> int:
    """Bytes of the cell: what `dynaexq` takes with its share of experts high."""
    total = opened.shape.layers * opened.shape.experts
    slots = round(total * cell.share)
    return slots * _size(opened, cell.high) + (total - slots + default_spare(opened.shape)) * _size(opened, cell.low)


def _uniform(cell: Cell, opened: ExpertStore) -> str:
    """The best tier that all experts fit at in the cell's bytes."""
    experts, budget = opened.shape.layers * opened.shape.experts, _budget(cell, opened)
    return max((tier for tier in UNIFORM if _size(opened, tier) * experts <= budget), key=tier_rank)


def _uniforms(cell: Cell, job: Job) -> set[str]:
    """Tiers at which all experts are run, besides the reference."""
    return {cell.low, cell.high, _uniform(cell, ExpertStore.open(job.stores[cell.quantizer]))} - {"bf16"}


def write_profiles(reference: Any, workloads: dict[str, Workload], store: Path, target: Path) -> dict[str, Path]:
    """Profiles of each workload, on the very windows it is evaluated on (oracles), and of the whole stream."""
    opened, runtime = ExpertStore.open(store), runtime_of(reference)
    sums = {}
    for name, workload in workloads.items():
        runtime.listener = meter = TrafficMeter(opened.shape)
        with torch.inference_mode():
            for start in range(0, len(workload.windows), BATCH):
                reference.model(workload.windows[start : start + BATCH], use_cache=False)
        sums[name] = meter.sums
    runtime.listener = None
    sums["stream"] = np.sum(list(sums.values()), 0)
    paths = {name: target / f"{name}.json" for name in sums}
    for name, path in paths.items():
        TrafficProfile.of(opened.fingerprint, "count", sums[name], int(sums[name].sum()), [name]).save(path)
    return paths


def _prepare(directory: Path, cells: list[Cell]) -> dict[str, Path]:
    stores = {cell.quantizer: directory / cell.quantizer for cell in cells}
    for quantizer, root in stores.items():
        options = PrepareOptions(UNIFORM, 64, quantizer)
        prepare_store(open_experts(EMBEDDED_MODEL)[1], root, options, lambda *_: None)
        print(f"prepared {quantizer}", file=sys.stderr)
    return stores


if __name__ == "__main__":
    main()
