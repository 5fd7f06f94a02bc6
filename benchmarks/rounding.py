"""What the native kernels' roundings cost in quality, on the embedded model.

    python -m benchmarks.rounding [--quick] [--json FILE|-] [--readme FILE]

For every tier: KL of the reference kernel to bf16 (what the tier costs), and KL of the native kernel to the reference
at the same tier (what rounded activations add). For dense layers: KL of each form to plain ones, experts at bf16.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_run, pin_threads, publish
from dynaexq.evaluate import read_documents
from dynaexq.evaluate.divergence import Scores, compare_models
from dynaexq.evaluate.intervals import bootstrap_mean
from dynaexq.integrations.transformers import DynaExqConfig
from dynaexq.integrations.transformers.loading import load_model, load_tokenizer, quiet_transformers
from dynaexq.launch import EMBEDDED_MODEL

TEXTS = ("english_heldout.txt", "gsm8k_test.jsonl", "humaneval.jsonl")
TIERS = ("int8", "int4", "int2", "int1")
DENSE = ("bf16", "int8", "int4")
WINDOW, BATCH, TOKENS = 512, 8, 8192


def load(**options: Any) -> Any:
    """The embedded model."""
    return load_model(EMBEDDED_MODEL, DynaExqConfig(**options), torch.float32)


def cut_texts(tokens: int) -> torch.Tensor:
    """Windows [count, WINDOW] of the shipped texts, `tokens` of each."""
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    parts = []
    for name in TEXTS:
        text = "\n\n".join(read_documents(Path(__file__).parent.parent / "data" / name))
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"][: tokens // WINDOW * WINDOW])
        parts.append(ids[: len(ids) // WINDOW * WINDOW].reshape(-1, WINDOW))
    return torch.cat(parts)


def divergence(scores: Scores) -> dict[str, Any]:
    """Mean KL in nats per token with its 95 % interval."""
    _, divergences, tokens = scores.arrays()
    mean, low, high = bootstrap_mean(divergences, tokens)
    return {"mean": mean, "interval": [low, high]}


def measure(windows: torch.Tensor, tiers: tuple[str, ...], dense: tuple[str, ...]) -> dict[str, Any]:
    """Both comparisons."""
    quiet = lambda done, total: None  # noqa: E731
    plain = load(mode="full", kernel="reference")
    result: dict[str, Any] = {"tiers": {}, "dense": {}}
    for tier in tiers:
        reference = load(mode="static", tier=tier, kernel="reference")
        native = {name: load(mode="static", tier=tier, activations=name) for name in ("int8", "fp32")}
        cost = compare_models(plain, {"tier": reference}, windows, BATCH, quiet)["tier"]
        added = compare_models(reference, native, windows, BATCH, quiet)
        row = {"tier": divergence(cost), **{name: divergence(added[name]) for name in native}}
        result["tiers"][tier] = {**row, "share": row["int8"]["mean"] / row["tier"]["mean"]}
        print(f"{tier}: {result['tiers'][tier]}", file=sys.stderr)
    for form in dense:
        models = {name: load(mode="full", dense=form, activations=name) for name in ("int8", "fp32")}
        found = compare_models(plain, models, windows, BATCH, quiet)
        result["dense"][form] = {name: divergence(found[name]) for name in models}
        print(f"dense {form}: {result['dense'][form]}", file=sys.stderr)
    return result


def render(result: dict[str, Any]) -> str:
    """The Markdown tables."""
    lines = [
        "| experts | KL(bf16, tier) | KL(reference, native), int8 activations | share | fp32 activations |",
        "| --- | --: | --: | --: | --: |",
    ]
    for tier, row in result["tiers"].items():
        lines.append(
            f"| {tier} | {_number(row['tier'])} | {_number(row['int8'])} | {100 * row['share']:.1f} % | "
            f"{row['fp32']['mean']:.1e} |"
        )
    lines += ["", "| dense layers | KL(full, packed), int8 activations | fp32 activations |", "| --- | --: | --: |"]
    for form, row in result["dense"].items():
        lines.append(f"| {form} | {_number(row['int8'])} | {_number(row['fp32'])} |")
    return "\n".join([*lines, "", f"Nats per token over {result['tokens']:,} tokens, 95 % interval."])


def _number(value: dict[str, Any]) -> str:
    low, high = value["interval"]
    return f"{value['mean']:.2g} [{low:.2g}, {high:.2g}]"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two tiers, one dense form, few tokens")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    parser.add_argument("--readme", metavar="FILE", help="put the tables between the markers of this file")
    arguments = parser.parse_args()
    pin_threads()
    quiet_transformers()
    windows = cut_texts(1024 if arguments.quick else TOKENS)
    tiers, dense = (("int4", "int2"), ("int8",)) if arguments.quick else (TIERS, DENSE)
    result = {"run": describe_run(), "tokens": windows.numel(), **measure(windows, tiers, dense)}
    publish(result, render(result), "rounding", arguments.json, arguments.readme)


if __name__ == "__main__":
    main()
