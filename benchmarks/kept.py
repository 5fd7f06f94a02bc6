"""What it costs to keep keys and values in fewer bytes, on the embedded model.

    python -m benchmarks.kept [--quick] [--json FILE|-] [--readme FILE]

Windows of text go through decode steps, a token at a time, so that every token looks at kept keys and values: KL of
each form to float32, experts at bf16, dense layers at int8.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe_run, pin_threads, publish
from benchmarks.rounding import cut_texts, load
from dynaexq.evaluate.intervals import bootstrap_mean
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.integrations.transformers.slot_model import SlottedModel

FORMS = ("float16", "bfloat16", "int8")
TOKENS = 8192


def measure(windows: torch.Tensor) -> dict[str, Any]:
    """Mean KL in nats per token and its 95 % interval, by form."""
    count, length = windows.shape
    model = load(mode="full", dense="int8")
    exact, *others = (SlottedModel(model, count, length, form) for form in (None, *FORMS))
    sums = np.zeros((len(FORMS), count))
    slots = list(range(count))
    for place in range(length):
        tokens, pasts = windows[:, place].contiguous(), [place] * count
        logits = []
        for each in (exact, *others):
            with torch.inference_mode(), each.window(prefill=False, runs=()):
                logits.append(torch.log_softmax(each.decode(slots, pasts, tokens).double(), -1))
        for row, found in enumerate(logits[1:]):
            sums[row] += (logits[0].exp() * (logits[0] - found)).sum(-1).numpy()
    result = {}
    for form, divergences in zip(FORMS, sums, strict=True):
        mean, low, high = bootstrap_mean(divergences, np.full(count, length))
        result[form] = {"mean": mean, "interval": [low, high]}
    return result


def render(result: dict[str, Any]) -> str:
    """The Markdown table."""
    lines = ["| keys and values | bytes | KL(float32, kept) |", "| --- | --: | --: |"]
    for form, row in result["forms"].items():
        low, high = row["interval"]
        nbytes = "1, and 4 for each key and value" if form == "int8" else "2"
        lines.append(f"| {form} | {nbytes} | {row['mean']:.2g} [{low:.2g}, {high:.2g}] |")
    return "\n".join([*lines, "", f"Nats per token over {result['tokens']:,} tokens, 95 % interval."])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few tokens")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    parser.add_argument("--readme", metavar="FILE", help="put the table between the markers of this file")
    arguments = parser.parse_args()
    pin_threads()
    quiet_transformers()
    windows = cut_texts(512 if arguments.quick else TOKENS)
    result = {"run": describe_run(), "tokens": windows.numel(), "forms": measure(windows)}
    publish(result, render(result), "kept", arguments.json, arguments.readme)


if __name__ == "__main__":
    main()
