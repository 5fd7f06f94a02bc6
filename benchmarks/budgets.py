"""Quality against device bytes: uniform tiers, static maps, the paper's online precision, and each step beyond it.

    python -m benchmarks.budgets [--quick] [--texts DIR] [--calibrated STORE] [--jobs N] [--json FILE|-] [--readme FILE]

A stream of three workloads (text, then math, then code) goes through every method at every budget of expert bytes, one
window set per forward pass and one update of the wanted levels after each. Perplexity, KL to bf16 and paired
differences, 95 % intervals by bootstrap over documents. `benchmarks.budgets_plot` draws the result.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.adaptive import TOKENS, kl_by_pass, write_profiles
from benchmarks.adaptive_stream import Stream, score_models
from benchmarks.budgets_report import render
from benchmarks.calibrated import make_calibrated_store
from benchmarks.machine import THREADS, describe_run, publish
from benchmarks.spread import make_parser, run_in_processes
from benchmarks.workloads import read_workloads
from dynaexq.formats import DEFAULT_QUANTIZER
from dynaexq.formats.quantizers import CALIBRATED
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.loading import load_model, load_tokenizer, open_experts, quiet_transformers
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.store import ExpertStore, PrepareOptions, prepare_store

BATCH, PASSES = 4, 20
"""Windows of a forward pass, and passes and updates of each phase: 40,880 tokens a phase."""

BITS = (3.0, 3.5, 4.0, 4.5, 5.5, 6.5)
"""Budgets, per expert weight: scales, offsets, padding and spare blocks included."""

PAIR_BELOW = 4.8
"""Bits below which the paper's way has int4 over int2, and above which int8 over int4."""

UNIFORM = ("int2", "int2d4", "int3", "int3d4", "int4", "int4d8", "int8")
FITTED = "int2,int2d3,int2d4,int3,int3d4,int4,int4+4,int4d8,int8,bf16"
QUICK_FITTED = ("int2,int4", 256)
PLAIN = ("int2", "int4", "int8")
"""Tiers of the stores without a calibration."""

EXTRAS: dict[float, dict[str, dict[str, Any]]] = {
    3.5: {
        "margin 0": {"margin": 0.0},
        "margin 0.05": {"margin": 0.05},
        "signal mass": {"signal": "mass"},
        "shadow": {"shadow": "on"},
        "no drift": {"keep_at_shift": 1.0},
    },
}
EXTRAS[5.5] = EXTRAS[3.5]
NESTED_AT = 5.5


class Job(NamedTuple):
    """What one process computes."""

    bits: list[float]
    uniform: bool
    highest: str
    stores: dict[str, Path]
    texts: Path | None
    passes: int
    batch: int
    threads: int


def main() -> None:
    """Run the comparison."""
    arguments = _parse()
    quiet_transformers()
    budgets, passes, batch = ((3.5,), 2, 1) if arguments.quick else (BITS, PASSES, BATCH)
    with tempfile.TemporaryDirectory() as directory:
        stores = _prepare(Path(directory), arguments)
        jobs, highest = min(arguments.jobs, len(budgets)), "int4" if arguments.quick else "int8"
        parts = [
            Job([*budgets[n::jobs]], n == jobs - 1, highest, stores, arguments.texts, passes, batch, THREADS // jobs)
            for n in range(jobs)
        ]
        results = run_in_processes(compare, parts)
    methods = {name: method for result in results for name, method in result["methods"].items()}
    result = {
        "run": describe_run(),
        "passes": passes,
        "tokens_per_pass": batch * (TOKENS - 1),
        "bits": list(budgets),
        **{name: results[0][name] for name in ("files", "documents", "full", "weights")},
        "methods": dict(sorted(methods.items())),
    }
    publish(result, render(result), "budgets", arguments.json, arguments.readme)


def compare(job: Job) -> dict[str, Any]:
    """All methods at the job's budgets over the whole stream."""
    torch.set_num_threads(job.threads)
    quiet_transformers()
    workloads = read_workloads(load_tokenizer(EMBEDDED_MODEL), job.texts, job.passes * job.batch, TOKENS)
    fitted = job.stores[CALIBRATED]
    reference = load_model(fitted, DynaExqConfig(mode="full", activations="fp32"), torch.float32)
    weights = ExpertStore.open(fitted).shape.weights
    with tempfile.TemporaryDirectory() as directory:
        profiles = write_profiles(reference, workloads, fitted, Path(directory))
        models = {
            name: load_model(job.stores[store], config, torch.float32)
            for name, (store, config) in _methods(job, profiles, weights).items()
        }
    scores, moved = score_models(reference, models, workloads, job.batch, f"{len(models)} methods")
    stream = Stream(workloads, job.batch)
    own = {bits: scores[f"{bits:g} all tiers"] for bits in job.bits}

    def describe(name: str, model: Any) -> dict[str, Any]:
        bits = float(name.split(maxsplit=1)[0]) if name.split(maxsplit=1)[0] != "uniform" else None
        runtime = runtime_of(model)
        pools = zip(runtime.experts.formats, runtime.experts.pools, strict=True)
        return {
            "bits": runtime.experts.bits_per_weight,
            "bytes": runtime.experts.expert_bytes,
            "quality": stream.summary(scores[name]),
            "all_tiers_against": None if bits is None else stream.paired(own[bits], scores[name]),
            "kl_by_pass": kl_by_pass(scores[name], stream.batch),
            "moved_by_pass": moved[name],
            "promotions": runtime.counters.promotions,
            "tiers": {fmt.name: pool.capacity for fmt, pool in pools},
        }

    return {
        "files": {name: each.files for name, each in workloads.items()},
        "documents": {name: len(set(each.documents)) for name, each in workloads.items()},
        "full": stream.summary(scores["reference"]),
        "weights": weights,
        "methods": {name: describe(name, model) for name, model in models.items()},
    }


def _methods(job: Job, profiles: dict[str, Path], weights: int) -> dict[str, tuple[str, DynaExqConfig]]:
    """Store and configuration of every method by name: budget, then what it does."""
    common: dict[str, Any] = {"activations": "fp32"}
    found: dict[str, tuple[str, DynaExqConfig]] = {}
    for bits in job.bits:
        memory = int(bits * weights / 8)
        pair = {"high": "int4", "low": "int2"} if bits < PAIR_BELOW else {"high": "int8", "low": "int4"}
        whole = {"high": job.highest, "low": "int2"}

        def online(tiers: dict[str, str], memory: int = memory, **tuning: Any) -> DynaExqConfig:
            return DynaExqConfig(mode="dynaexq", drive="replay", tuning=tuning, expert_memory=memory, **tiers, **common)

        for store, name in (("rtn", "paper"), (DEFAULT_QUANTIZER, DEFAULT_QUANTIZER), (CALIBRATED, "fitted")):
            found[f"{bits:g} {name}"] = store, online(pair, slots="layer")
        found[f"{bits:g} all tiers"] = CALIBRATED, online(whole)
        for name, tuning in EXTRAS.get(bits, {}).items() if job.highest == "int8" else ():
            found[f"{bits:g} {name}"] = CALIBRATED, online(whole, **tuning)
        if bits == NESTED_AT and job.highest == "int8":
            found[f"{bits:g} nested"] = CALIBRATED, online({"high": "int4+4", "low": "int4"})
            found[f"{bits:g} pair"] = CALIBRATED, online(pair)
        for name, path in profiles.items():
            static = DynaExqConfig(mode="static-map", profile=str(path), expert_memory=memory, **whole, **common)
            found[f"{bits:g} map of {name}"] = CALIBRATED, static
    if job.uniform:
        for store, root in job.stores.items():
            for tier in set(UNIFORM).intersection(ExpertStore.open(root).manifest.tiers):
                found[f"uniform {tier} {store}"] = store, DynaExqConfig(mode="static", tier=tier, **common)
    return found


def _prepare(directory: Path, arguments: argparse.Namespace) -> dict[str, Path]:
    fitted = QUICK_FITTED if arguments.quick else (FITTED,)
    stores = {CALIBRATED: arguments.calibrated or make_calibrated_store(directory, *fitted)}
    for quantizer in ("rtn", DEFAULT_QUANTIZER):
        stores[quantizer] = directory / quantizer
        options = PrepareOptions(PLAIN[:2] if arguments.quick else PLAIN, 64, quantizer)
        prepare_store(open_experts(EMBEDDED_MODEL)[1], stores[quantizer], options, lambda *_: None)
    return stores


def _parse() -> argparse.Namespace:
    parser = make_parser(__doc__, "one budget, two passes a phase")
    parser.add_argument("--calibrated", type=Path, help="a calibrated store of the embedded model with all tiers")
    return parser.parse_args()


if __name__ == "__main__":
    main()
