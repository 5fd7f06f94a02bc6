"""Where a decode step's time goes: kernels, operations between them, and the rest of the model's code.

    python -m benchmarks.profile [STORE] [--steps N] [--tier TIER] [--dense FORM] [--quick] [--json FILE|-]

STORE is made by `dynaexq prepare` or `dynaexq synth`; default the embedded model. The same steps are timed with native
decode steps and without (then part by part): what is timed inside a part is not counted again outside.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe_run, pin_threads, save
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.cache import RoomyLayer, cache_argument, make_cache
from dynaexq.integrations.transformers.loading import load_model, quiet_transformers
from dynaexq.integrations.transformers.native_decoder import NativeDecoder
from dynaexq.integrations.transformers.norms import NativeRMSNorm
from dynaexq.kernels.dense import PackedMatrix
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.runtime import ExpertRuntime

PAST = 128
PARTS: list[tuple[str, Any, str]] = [
    ("experts", ExpertRuntime, "forward"),
    ("dense layers", PackedMatrix, "multiply"),
    ("norms", NativeRMSNorm, "forward"),
    ("cache", RoomyLayer, "update"),
    ("attention", torch.nn.functional, "scaled_dot_product_attention"),
    ("router's choice", torch, "topk"),
    ("native steps", NativeDecoder, "step"),
]


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Seconds spent in each of PARTS while the context is open."""
    seconds: dict[str, float] = defaultdict(float)
    originals = [(owner, name, getattr(owner, name)) for _, owner, name in PARTS]

    def wrap(label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                seconds[label] += time.perf_counter() - start

        return timed

    for (label, owner, name), (_, _, call) in zip(PARTS, originals, strict=True):
        setattr(owner, name, wrap(label, call))
    try:
        yield seconds
    finally:
        for owner, name, call in originals:
            setattr(owner, name, call)


def time_steps(model: Any, steps: int, native: bool) -> dict[str, float]:
    """Milliseconds of one decode step by part, and in all (median); native steps only if `native`."""
    cache = make_cache(model.config, PAST + steps)
    if not native:  # the usual cache, which no native step takes over
        cache.layers = [_usual(layer) for layer in cache.layers]
    argument, vocabulary = cache_argument(model), model.config.get_text_config().vocab_size
    totals = []
    with torch.inference_mode():
        model(torch.randint(0, vocabulary, (1, PAST)), **{argument: cache}, logits_to_keep=1)
        with timed_parts() as seconds:
            for _ in range(steps):
                ids = torch.randint(0, vocabulary, (1, 1))
                start = time.perf_counter()
                model(ids, **{argument: cache}, logits_to_keep=1)
                totals.append(time.perf_counter() - start)
    parts = {label: 1e3 * value / steps for label, value in seconds.items()}
    whole = 1e3 * float(np.mean(totals))
    return {**parts, "everything else": whole - sum(parts.values()), "step": 1e3 * float(np.median(totals))}


class UsualLayer(RoomyLayer):
    """A roomy layer under another name."""


def _usual(layer: Any) -> Any:
    return UsualLayer(layer._room) if type(layer) is RoomyLayer else layer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--tier", default="int4")
    parser.add_argument("--dense", default="int4")
    parser.add_argument("--quick", action="store_true", help="8 steps")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    arguments = parser.parse_args()
    pin_threads()
    quiet_transformers()
    config = DynaExqConfig(mode="static", tier=arguments.tier, dense=arguments.dense)
    model = load_model(arguments.store, config, torch.float32)
    steps = 8 if arguments.quick else arguments.steps
    forms = {"native steps": True, "layer by layer": False}
    rounds = [{name: time_steps(model, steps, native) for name, native in forms.items()} for _ in range(3)]
    medians = {
        name: {part: float(np.median([each[name][part] for each in rounds])) for part in rounds[0][name]}
        for name in forms
    }
    layers = runtime_of(model).experts.shape.layers
    result = {"run": describe_run(), "model": arguments.store.name, "layers": layers, "milliseconds": medians}
    save(result, arguments.json)
    if arguments.json != "-":
        for name, parts in medians.items():
            print(f"{name}: {parts['step']:.2f} ms a step")
            for part, value in sorted(parts.items(), key=lambda item: -item[1]):
                if part != "step":
                    print(f"  {part:16s} {value:7.3f} ms, {1e3 * value / layers:6.0f} us a layer")


if __name__ == "__main__":
    main()
