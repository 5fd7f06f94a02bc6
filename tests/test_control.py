"""The whole loop on a real model: every window computes exactly what its pinned version map says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynaexq.control_options import ControlOptions
from dynaexq.core import OptionError, decode_handle, encode_handle
from dynaexq.device import CpuDevice
from dynaexq.device.copies import ThreadCopyEngine
from dynaexq.formats import VersionLayout
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.loading import load_model, open_experts, quiet_transformers
from dynaexq.kernels import make_kernel
from dynaexq.residency import BudgetTracker
from dynaexq.residency.layout import plan_pair
from dynaexq.residency.resizing import PoolBorder
from dynaexq.residency.transitions import RateLimit, TransitionPipeline
from dynaexq.residency.versions import VersionedExperts, load_versions
from dynaexq.store import ExpertStore, PrepareOptions, prepare_store
from support.files import silent

quiet_transformers()
TIERS = ("bf16", "int2")
FLIPS = 3000
PROMPTS = [torch.randint(3, 256, (1, 9), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def store(checkpoint_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("control") / "store"
    prepare_store(open_experts(checkpoint_directory)[1], root, PrepareOptions(("int2", "bf16"), 32, "rtn"), silent)
    return root


def load(store: Path, drive: str, high_experts: int = 4, spare: int = 1) -> Any:
    opened = ExpertStore.open(store)
    high, low = (VersionLayout.of(opened.format(tier), opened.shape.expert).extent_bytes for tier in TIERS)
    memory = high * high_experts + low * (opened.shape.layers * opened.shape.experts - high_experts + spare)
    config = DynaExqConfig(
        mode="dynaexq", high="bf16", low="int2", expert_memory=memory, drive=drive, tuning={"spare": spare}
    )
    return load_model(store, config, torch.float32)


def reference(store: Path, model: Any) -> Callable[[torch.Tensor, list[str]], torch.Tensor]:
    """Logits of a forward whose experts are fixed at the given tiers; `model` lends its dense part."""
    opened = ExpertStore.open(store)
    for tier in TIERS:
        opened.require_tier(tier)
    sizes = (VersionLayout.of(opened.format(tier), opened.shape.expert).extent_bytes for tier in TIERS)
    plan = plan_pair(opened.shape, *sizes, 1 << 28, "keep")
    assert plan.raised == opened.shape.layers * opened.shape.experts  # both versions of each stay, and never move
    experts = VersionedExperts(opened, TIERS, plan, CpuDevice(), BudgetTracker(1 << 28))
    load_versions(experts, opened, np.zeros((opened.shape.layers, opened.shape.experts), np.int8), lambda *_: None)
    kernel = make_kernel("native", experts)

    def logits(ids: torch.Tensor, tiers: list[str]) -> torch.Tensor:
        for index, key in enumerate(opened.shape.expert_keys()):
            pool = TIERS.index(tiers[index])
            experts.handles.publish(index, encode_handle(pool, experts.entries[key].blocks[pool] or 0))
        runtime = runtime_of(model)
        moving = runtime.experts, runtime.kernel, runtime.listener
        runtime.experts, runtime.kernel, runtime.listener = experts, kernel, None
        try:
            with torch.inference_mode():
                result: torch.Tensor = model(ids).logits
            return result
        finally:
            runtime.experts, runtime.kernel, runtime.listener = moving

    return logits


def watch_maps(model: Any, maps: list[list[str]]) -> None:
    """Append the tiers that each window pinned, from inside the forward."""
    runtime = runtime_of(model)

    def note(*_: Any) -> None:
        if runtime.control is not None:
            words = runtime._local.words
            assert words is not None
            maps.append([TIERS[decode_handle(int(word)).format_index] for word in words])

    model.model.layers[0].register_forward_pre_hook(note)


def test_replay_brings_the_hottest_experts_up(store: Path) -> None:
    model = load(store, "replay")
    runtime = runtime_of(model)
    maps: list[list[str]] = []
    watch_maps(model, maps)
    fixed = reference(store, model)
    with torch.inference_mode():
        found = [model(PROMPTS[0]).logits for _ in range(4)]
    runtime.close()
    runtime.experts.check_integrity()
    control = runtime.control
    assert control is not None
    assert maps[0] != maps[-1]
    assert maps[-1].count("bf16") == 4
    for layer, scores in enumerate(control.hotness.scores):
        high = control.pipeline.pending_levels[layer] == 0
        assert scores[high].min() >= scores[~high].max() - control.options.selection.margin
    counters = runtime.counters
    assert counters.waits == 0
    assert counters.promotions == counters.demotions > 0
    assert counters.evictions == counters.promotions + counters.demotions
    assert counters.bytes_moved > 0
    for logits, tiers in zip(found, maps, strict=True):
        assert torch.equal(logits, fixed(PROMPTS[0], tiers))


def test_blocking_waits_and_threads_do_not(store: Path) -> None:
    for drive in ("blocking", "thread"):
        model = load(store, drive)
        with torch.inference_mode():
            for _ in range(3):
                model(PROMPTS[1])
        runtime = runtime_of(model)
        runtime.close()
        assert (runtime.counters.waits > 0) is (drive == "blocking")
        assert 0 < runtime.hot_share_high < 1


def test_flipping_versions_under_concurrent_forwards_never_mixes_them(store: Path) -> None:
    """Torture: a control thread flips random high sets as fast as it can, free blocks are poisoned, two threads run."""
    model = load(store, "replay", high_experts=8, spare=6)
    runtime = runtime_of(model)
    experts = runtime.experts
    assert isinstance(experts, VersionedExperts)
    for pool in experts.pools:
        poison_on_return(experts, pool)
    source = ExpertStore.open(store)
    for tier in TIERS:
        source.require_tier(tier)
    fixed = reference(store, model)
    runtime.listener = None  # the test is the control loop
    stop, results, failures = threading.Event(), [], []

    def flip() -> None:
        wake = threading.Event()
        engine = ThreadCopyEngine(wake.set)
        border, limit = PoolBorder(experts), RateLimit(None, 6)
        pipeline = TransitionPipeline(experts, source, border, engine, limit, failures.append)
        random = np.random.default_rng(0)
        counters = pipeline.counters
        while counters.promotions + counters.demotions < FLIPS or pipeline.busy:
            if pipeline.idle:
                scores = random.random((experts.shape.layers, experts.shape.experts))
                cold = np.argsort(-scores.ravel()).argsort() >= experts.plan.raised
                pipeline.want(cold.astype(np.int8).reshape(scores.shape), scores)
            pipeline.step(0.0)
            wake.wait(0.001)  # for a copy to end, or a window that holds a block back
            wake.clear()
        engine.close()
        stop.set()

    def forward(ids: torch.Tensor) -> None:
        local = runtime._local

        def note(*_: Any) -> None:
            local.seen = [TIERS[decode_handle(int(word)).format_index] for word in local.words]

        hook = model.model.layers[0].register_forward_pre_hook(note)
        with torch.inference_mode():
            while not stop.is_set():
                logits = model(ids).logits
                results.append((ids, local.seen, logits))
        hook.remove()

    flipper = threading.Thread(target=flip)
    readers = [threading.Thread(target=forward, args=(ids,)) for ids in PROMPTS[:2]]
    for thread in (flipper, *readers):
        thread.start()
    for thread in (flipper, *readers):
        thread.join()
    assert not failures
    experts.check_integrity()
    assert len({tuple(tiers) for _, tiers, _ in results}) > 100
    expected: dict[tuple[int, ...], torch.Tensor] = {}
    for ids, tiers, logits in results:
        case = (*ids[0].tolist(), *map(TIERS.index, tiers))
        if case not in expected:
            expected[case] = fixed(ids, tiers)
        assert torch.equal(logits, expected[case])
    source.close()


def poison_on_return(experts: VersionedExperts, pool: Any) -> None:
    """Fill every block that comes back with NaN patterns."""
    give_back = pool.give_back

    def poison(offset: int) -> None:
        experts.arena.host_view(offset, pool.block_bytes)[:] = 0xFF
        give_back(offset)

    pool.give_back = poison


def test_options_of_the_loop_are_checked() -> None:
    for options in (ControlOptions(drive="luck"), ControlOptions(interval=0.01), ControlOptions(every_windows=0)):
        with pytest.raises(OptionError):
            options.check()
    for words, named in (
        ("needs expert_memory", {"mode": "dynaexq"}),
        ("takes high and low", {"mode": "dynaexq", "tier": "int4", "expert_memory": 1}),
        ("high go with modes 'dynaexq' and", {"mode": "full", "high": "bf16"}),
    ):
        with pytest.raises(OptionError, match=words):
            DynaExqConfig(**named)  # type: ignore[arg-type]
