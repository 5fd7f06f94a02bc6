"""What control costs: the tick, the hand-over on the token path, and how spare blocks speed exchanges up.

    python -m benchmarks.control [--quick] [--json FILE|-]

On a model of 48 layers of 512 experts, without its arithmetic: versions are 4 KiB, copies write nothing.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.machine import describe_run, pin_threads, save
from dynaexq.control import ControlLoop
from dynaexq.control_options import ControlOptions
from dynaexq.core import ExpertKey, ExpertShape, ModelShape
from dynaexq.device import CpuDevice
from dynaexq.device.copies import CopyEngine, ThreadCopyEngine
from dynaexq.device.fake import FakeCopyEngine
from dynaexq.formats import ExpertFormat, tier_format
from dynaexq.kernels import ExpertsCall, LayerFunctions
from dynaexq.policy import Hotness, HotnessOptions, SelectionOptions, pick_hottest, select_high
from dynaexq.policy.ladder import Ladder
from dynaexq.residency import BudgetTracker
from dynaexq.residency.layout import PoolPlan, share_evenly
from dynaexq.residency.resizing import PoolBorder
from dynaexq.residency.transitions import RateLimit, TransitionPipeline
from dynaexq.residency.versions import VersionedExperts, load_versions
from dynaexq.runtime import ExpertRuntime
from dynaexq.steering import Steering
from dynaexq.store.sensitivity import Sensitivity
from dynaexq.traffic import RoutedLayer
from dynaexq.traffic.recorder import ClosedWindow
from dynaexq.tuning import MARGIN, PRICED_MARGIN

SHAPE = ModelShape(48, 512, ExpertShape(64, 32))
TIERS = ("int2", "int1")
SLOTS, TOP_K = 128, 8
WINDOWS = 30
"""Forward passes between two updates: decode at 30 tokens a second."""


class EmptySource:
    """Versions of zeros, read in no time."""

    shape = SHAPE
    fingerprint = "empty"
    sensitivity: Sensitivity | None = None

    def format(self, tier: str) -> ExpertFormat:
        """Format of a tier."""
        return tier_format(tier, 32)

    def require_tier(self, tier: str) -> None:
        """They are there."""

    def read_into(self, key: ExpertKey, tier: str, destination: Any) -> None:
        """Leave the zeros."""

    def missing_files(self) -> list[str]:
        """None."""
        return []

    def close(self) -> None:
        """Nothing is open."""


class NullKernel:
    """Computes nothing, so that what is measured is everything else."""

    name = "null"

    def forward(self, call: ExpertsCall) -> torch.Tensor:
        """The input."""
        return call.hidden


def build(spare: int) -> VersionedExperts:
    """All experts of SHAPE, SLOTS of each layer high."""
    high = SLOTS * SHAPE.layers
    plan = PoolPlan((4096, 4096), (high,), (high, SHAPE.layers * SHAPE.experts - high + spare), keep_low=False)
    experts = VersionedExperts(EmptySource(), TIERS, plan, CpuDevice(), BudgetTracker(1 << 30))
    hottest = pick_hottest(np.zeros((SHAPE.layers, SHAPE.experts)), share_evenly(high, SHAPE.layers))
    load_versions(experts, EmptySource(), np.where(hottest, 0, 1).astype(np.int8), lambda *_: None)
    return experts


def make_pipeline(experts: VersionedExperts, engine: CopyEngine, limit: RateLimit) -> TransitionPipeline:
    """What moves them."""
    return TransitionPipeline(experts, EmptySource(), PoolBorder(experts), engine, limit, print)


def make_loop(
    experts: VersionedExperts, pipeline: TransitionPipeline, options: ControlOptions, wake: threading.Event
) -> ControlLoop:
    """What decides on them."""
    steering = Steering(experts.shape, pipeline.border, options.selection)
    return ControlLoop(experts, pipeline, steering, options, wake)


def measure_ticks(ticks: int) -> dict[str, Any]:
    """Milliseconds of the policy (fold traffic in, score, select) while hot sets shift every 50 ticks."""
    random = np.random.default_rng(0)
    capacity = share_evenly(SLOTS * SHAPE.layers, SHAPE.layers)
    result = {}
    for name, options in (("hysteresis", SelectionOptions(MARGIN)), ("plain top-n", SelectionOptions())):
        hotness = Hotness(SHAPE.layers, SHAPE.experts, HotnessOptions())
        current = np.zeros((SHAPE.layers, SHAPE.experts), bool)
        times, swaps = [], []
        for tick in range(ticks):
            if tick % 50 == 0:
                base = random.gamma(0.5, 2, current.shape) * 20
            decode = random.poisson(base).astype(float)
            prefill = np.zeros_like(decode)
            start = time.perf_counter()
            hotness.update(prefill, decode)
            wanted = select_high(hotness.scores, current, capacity, options)
            times.append(time.perf_counter() - start)
            swaps.append(int((wanted & ~current).sum()))
            current = wanted
        result[name] = {**_summary(times, 1e3), "swaps_median": float(np.median(swaps))}
    return result


def measure_ladder(ticks: int) -> dict[str, Any]:
    """Milliseconds of the same on a ladder of four tiers that the whole model shares."""
    random, shape = np.random.default_rng(0), (SHAPE.layers, SHAPE.experts)
    share = SHAPE.layers * SHAPE.experts // 8
    drops = random.uniform(0.5, 2.0, (3, *shape)) * np.array([0.06, 1.0, 4.0])[:, None, None]
    ladder = Ladder(np.array([[share], [2 * share], [3 * share]]), drops, (15, 4, 4), (51, 32, 24))
    hotness, nobody = Hotness(*shape, HotnessOptions()), np.zeros(shape, bool)
    current, options = np.full(shape, 3, np.int8), SelectionOptions(PRICED_MARGIN)
    times, moves = [], []
    for tick in range(ticks):
        if tick % 50 == 0:
            base = random.gamma(0.5, 2, shape) * 20
        decode = random.poisson(base).astype(float)
        prefill = np.zeros_like(decode)
        start = time.perf_counter()
        hotness.update(prefill, decode)
        wanted = ladder.choose(hotness.scores, current, options, nobody, nobody)
        times.append(time.perf_counter() - start)
        moves.append(int((wanted != current).sum()))
        current = wanted
    return {**_summary(times, 1e3), "moves_median": float(np.median(moves))}


def measure_handover(windows: int) -> dict[str, Any]:
    """Microseconds per layer that traffic adds to the token path at batch 1, with the control thread running."""
    experts = build(spare=4)
    wake = threading.Event()
    pipeline = make_pipeline(experts, ThreadCopyEngine(wake.set), RateLimit())
    loop = make_loop(experts, pipeline, ControlOptions(), wake)
    loop.start()
    runtime = ExpertRuntime("dynaexq", experts, NullKernel(), BudgetTracker(1), None)
    functions = LayerFunctions(lambda hidden: hidden, False, None, None)
    hidden, weights = torch.zeros(1, SHAPE.expert.hidden), torch.full((1, TOP_K), 1 / TOP_K)
    generator = torch.Generator().manual_seed(0)
    choices = [torch.randint(0, SHAPE.experts, (1, TOP_K), generator=generator) for _ in range(SHAPE.layers)]

    def window() -> float:
        start = time.perf_counter()
        runtime.begin_window(False)
        for layer, ids in enumerate(choices):
            runtime.forward(layer, functions, hidden, ids, weights)
        runtime.end_window()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(windows):
        for name, listener in (("without", None), ("with", loop)):
            runtime.listener = listener
            times[name].append(window())
    loop.close()
    added = np.array(times["with"]) - np.array(times["without"])
    return {
        "added_per_layer": {name: value / SHAPE.layers for name, value in _summary(added.tolist(), 1e6).items()},
        "window_without": _summary(times["without"], 1e6),
        "window_with": _summary(times["with"], 1e6),
        "ticks": loop.ticks,
    }


def measure_updates(updates: int) -> dict[str, Any]:
    """Milliseconds of whole updates in the control thread: add up WINDOWS forward passes, decide, queue transitions."""
    experts = build(spare=4)
    pipeline = make_pipeline(experts, FakeCopyEngine(), RateLimit())
    options = ControlOptions(drive="replay", every_windows=1 << 30)
    loop = make_loop(experts, pipeline, options, threading.Event())
    generator, levels = torch.Generator().manual_seed(0), np.zeros(SHAPE.layers * SHAPE.experts, np.int64)
    weights, times = torch.full((1, TOP_K), 1 / TOP_K), []
    for _ in range(updates):
        for _ in range(WINDOWS):
            ids = torch.randint(0, SHAPE.experts, (SHAPE.layers, 1, TOP_K), generator=generator)
            layers = [RoutedLayer(layer, ids[layer], weights) for layer in range(SHAPE.layers)]
            loop.after_window(ClosedWindow(layers, False, levels))
        start = time.perf_counter()
        loop.update()
        times.append(time.perf_counter() - start)
    return _summary(times, 1e3)


def count_windows(spare: int, exchanges: int) -> dict[str, int]:
    """Forward passes until `exchanges` experts have changed places, where copies take no time and only blocks lack."""
    experts, engine = build(spare), FakeCopyEngine()
    pipeline = make_pipeline(experts, engine, RateLimit(None, 64))
    scores = np.zeros((SHAPE.layers, SHAPE.experts))
    for number in range(exchanges):
        scores[number % SHAPE.layers, SLOTS + number // SHAPE.layers] = 1.0
    wanted = Steering(SHAPE, pipeline.border, SelectionOptions()).choose(scores, experts.levels())
    pipeline.want(wanted, scores)
    windows = 0
    while not pipeline.idle:
        window, _ = experts.handles.pin()
        for _ in range(4):  # a forward pass is long enough for what blocks allow
            pipeline.step(0.0)
            for ticket in list(engine.running):
                engine.end(ticket)
        experts.handles.release(window)
        windows += 1
    return {"spare": spare, "exchanges": exchanges, "windows": windows, "deferred": pipeline.counters.deferred}


def _summary(seconds: list[float], unit: float) -> dict[str, float]:
    values = np.array(seconds) * unit
    return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99))}


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    arguments = parser.parse_args()
    pin_threads()
    scale: Callable[[int], int] = lambda count: count // 5 if arguments.quick else count  # noqa: E731
    result = {
        "run": describe_run(),
        "tick_milliseconds": measure_ticks(scale(1000)),
        "ladder_milliseconds": measure_ladder(scale(1000)),
        "update_milliseconds": measure_updates(scale(100)),
        "handover_microseconds": measure_handover(scale(2000)),
        "exchanges": [count_windows(spare, scale(960)) for spare in (1, 2, 4, 8, 16)],
    }
    save(result, arguments.json)
    if arguments.json != "-":
        for name, tick in result["tick_milliseconds"].items():
            print(
                f"tick, {name}: median {tick['median']:.2f} ms, p99 {tick['p99']:.2f}, {tick['swaps_median']:.0f} swaps"
            )
        ladder = result["ladder_milliseconds"]
        print(
            f"tick on a ladder of four tiers: median {ladder['median']:.2f} ms, p99 {ladder['p99']:.2f}, "
            f"{ladder['moves_median']:.0f} moves"
        )
        update = result["update_milliseconds"]
        print(f"whole update over {WINDOWS} forward passes: median {update['median']:.2f} ms, p99 {update['p99']:.2f}")
        added = result["handover_microseconds"]["added_per_layer"]
        print(f"hand-over: median {added['median']:.2f} us a layer, p99 {added['p99']:.2f}")
        for row in result["exchanges"]:
            print(f"{row['exchanges']} exchanges with {row['spare']} spare blocks: {row['windows']} forward passes")


if __name__ == "__main__":
    main()
