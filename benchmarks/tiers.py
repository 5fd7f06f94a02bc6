"""Quality of every tier and quantiser on the embedded model.

    python -m benchmarks.tiers [--quick] [--texts DIR] [--json FILE|-] [--readme FILE]

Perplexity and KL to bf16 over consecutive windows of 512 tokens, 95 % intervals by bootstrap over windows.
Texts come from data/ and, where named there, from the directory given with --texts; `calibrated` versions are fitted to
other texts (see calibrated.py).
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.calibrated import make_calibrated_store
from benchmarks.machine import describe_run, pin_threads, publish
from benchmarks.workloads import SHIPPED
from dynaexq.core import ExpertShape
from dynaexq.evaluate import read_documents
from dynaexq.evaluate.divergence import Scores, compare_models
from dynaexq.evaluate.intervals import bootstrap_mean
from dynaexq.formats import DEFAULT_QUANTIZER, QUANTIZERS, VersionLayout, tier_format
from dynaexq.formats.base import base_tier, with_bases
from dynaexq.formats.quantizers import CALIBRATED
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.loading import load_model, load_tokenizer, quiet_transformers
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.plan.memory import MIB

TEXTS = {
    "WikiText-2": "wikitext2_valid_detok.txt",
    "English": "english_heldout.txt",
    "GSM8K": "gsm8k_test.jsonl",
    "HumanEval": "humaneval.jsonl",
    "code": "code_heldout.py.txt",
}
QUANTISED = ("int8", "int4", "int3", "int2", "int1")
UNEVEN = ("int4d8", "int3d4", "int2d4", "int2d3")
FITTED = ("int4+4", "int4", "int2+2", "int3", "int2", *UNEVEN)
VARIANTS = [
    *((tier, quantizer) for tier in QUANTISED for quantizer in QUANTIZERS if (tier, quantizer) != ("int8", "hqq")),
    *((tier, DEFAULT_QUANTIZER) for tier in UNEVEN),
]
"""hqq moves offsets alone, so on the symmetric int8 it is rtn."""

GROUP_SIZE, WINDOW, BATCH = 64, 512, 8


def main() -> None:
    """Run the comparison."""
    arguments = _parse()
    pin_threads()
    quiet_transformers()
    reference = load_model(EMBEDDED_MODEL, DynaExqConfig(mode="full", kernel="reference"), torch.float32)
    variants = [("int2", "rtn"), ("int2", DEFAULT_QUANTIZER)] if arguments.quick else VARIANTS
    models = {}
    for tier, quantizer in variants:
        config = DynaExqConfig("static", tier, quantizer=quantizer, group_size=GROUP_SIZE, kernel="reference")
        models[f"{tier} {quantizer}"] = load_model(EMBEDDED_MODEL, config, torch.float32)
        print(f"loaded {tier} {quantizer}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as directory:
        if not arguments.quick:
            store = make_calibrated_store(Path(directory), ",".join(FITTED))
            models |= {f"{tier} {CALIBRATED}": _load_fitted(store, tier) for tier in FITTED}
        _compare(arguments, reference, models)


def _load_fitted(store: Path, tier: str) -> Any:
    """The calibrated model with every expert at `tier`."""
    print(f"loaded {tier} {CALIBRATED}", file=sys.stderr)
    base = base_tier(tier)
    if base is None:
        return load_model(store, DynaExqConfig("static", tier, kernel="reference"), torch.float32)
    config = DynaExqConfig("dynaexq", high=tier, low=base, expert_memory=1 << 30, drive="replay", kernel="reference")
    return load_model(store, config, torch.float32)


def _compare(arguments: argparse.Namespace, reference: Any, models: dict[str, Any]) -> None:
    best = DEFAULT_QUANTIZER if arguments.quick else CALIBRATED
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    shape = runtime_of(reference).experts.shape
    result: dict[str, Any] = {"run": describe_run(), "tokens": {}, "texts": {}, "best": best, "int2_against_rtn": {}}
    for name, path in _find_texts(arguments.texts).items():
        windows = _cut(tokenizer, path, arguments.tokens)
        scores = compare_models(
            reference, models, windows, BATCH, lambda d, t, n=name: print(f"{n}: {d}/{t} windows", file=sys.stderr)
        )
        result["tokens"][name] = int(sum(scores["reference"].tokens))
        result["texts"][name] = {variant: _summary(each) for variant, each in scores.items()}
        result["int2_against_rtn"][name] = _paired(scores[f"int2 {best}"], scores["int2 rtn"])
    every = ["bf16", *dict.fromkeys(name.split()[0] for name in models)]
    result["tiers"] = {tier: _sizes(tier, shape.expert, shape.layers * shape.experts) for tier in every}
    publish(result, render(result), "tiers", arguments.json, arguments.readme)


def render(result: dict[str, Any]) -> str:
    """The Markdown table of a result."""
    names = list(result["texts"])
    head = ["experts", "bits/weight", "MiB", *(f"{name} ppl" for name in names), *(f"{name} KL" for name in names)]
    rows = [head, ["---"] + ["--:"] * (len(head) - 1)]
    for variant in next(iter(result["texts"].values())):
        tier = "bf16" if variant == "reference" else variant.split()[0]
        size = result["tiers"][tier]
        cells = [result["texts"][name][variant] for name in names]
        perplexities = [f"{cell['perplexity']['mean']:.2f}" for cell in cells]
        divergences = ["0" if variant == "reference" else f"{cell['kl']['mean']:.2g}" for cell in cells]
        label = "bf16" if variant == "reference" else variant
        rows.append([label, f"{size['bits_per_weight']:.2f}", f"{size['mib']:.1f}", *perplexities, *divergences])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    margins = ", ".join(
        f"{name} {100 * (1 - math.exp(gain['mean'])):.2f} % "
        f"[{100 * (1 - math.exp(gain['high'])):.2f}, {100 * (1 - math.exp(gain['low'])):.2f}]"
        for name, gain in result["int2_against_rtn"].items()
    )
    tokens = ", ".join(f"{name} {count:,}" for name, count in result["tokens"].items())
    margin = f"Perplexity that `{result['best']}` takes off `rtn` at int2 (paired, 95 % interval): {margins}."
    lines += ["", margin, "", f"Tokens: {tokens}. Groups of {GROUP_SIZE}; MiB is all experts, padding left out."]
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two tiers, two quantisers, few tokens")
    parser.add_argument("--texts", type=Path, help="directory with the texts that are not shipped")
    parser.add_argument("--tokens", type=int, help="tokens per text (default 24576; 2048 with --quick)")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    parser.add_argument("--readme", metavar="FILE", help="replace the table between the markers of this file")
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or (2048 if arguments.quick else 24576)
    return arguments


def _find_texts(extra: Path | None) -> dict[str, Path]:
    found = {}
    for name, file in TEXTS.items():
        places = [SHIPPED / file] + ([extra / file] if extra else [])
        path = next((place for place in places if place.exists()), None)
        if path is None:
            print(f"left out {name}: {file} is not shipped; give its directory with --texts", file=sys.stderr)
        else:
            found[name] = path
    return found


def _cut(tokenizer: Any, path: Path, tokens: int) -> torch.Tensor:
    text = "\n\n".join(read_documents(path))[: tokens * 12]
    ids = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.long)[:tokens]
    return ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW)


def _summary(scores: Scores) -> dict[str, Any]:
    losses, divergences, tokens = scores.arrays()
    loss = bootstrap_mean(losses, tokens)
    return {
        "perplexity": {key: math.exp(value) for key, value in loss._asdict().items()},
        "kl": bootstrap_mean(divergences, tokens)._asdict(),
    }


def _paired(better: Scores, worse: Scores) -> dict[str, float]:
    """Difference of loss per token (nats): negative where `better` is better."""
    losses, _, tokens = better.arrays()
    return bootstrap_mean(losses - worse.arrays()[0], tokens)._asdict()


def _sizes(tier: str, expert: ExpertShape, count: int) -> dict[str, float]:
    """Of all experts at `tier`, with what it is nested in."""
    layouts = [VersionLayout.of(tier_format(name, GROUP_SIZE), expert) for name in with_bases((tier,))]
    payload = sum(layout.payload_bytes for layout in layouts)
    return {
        "bits_per_weight": payload * 8 / expert.weights,
        "mib": payload * count / MIB,
        "resident_mib": sum(layout.extent_bytes for layout in layouts) * count / MIB,
    }


if __name__ == "__main__":
    main()
