"""Static maps, starts from a ranking, and hotness kept over restarts, on a real model."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dynaexq.control
from dynaexq.core import OptionError, StoreError, decode_handle
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.loading import load_model, open_experts, quiet_transformers
from dynaexq.policy import pick_hottest
from dynaexq.runtime import ExpertRuntime
from dynaexq.store import ExpertStore, PrepareOptions, prepare_store
from dynaexq.traffic import TrafficProfile
from support.files import silent
from support.processes import SPAWN

quiet_transformers()
HIGH, LOW = "bf16", "int2"
IDS = torch.randint(3, 256, (1, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def store(checkpoint_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serving") / "store"
    prepare_store(open_experts(checkpoint_directory)[1], root, PrepareOptions((LOW, HIGH), 32, "rtn"), silent)
    return root


def budget(store: Path, high_experts: int = 4) -> int:
    manifest = ExpertStore.open(store).manifest
    total = manifest.shape.layers * manifest.experts
    low = manifest.tiers[LOW].extent_bytes
    return high_experts * manifest.tiers[HIGH].extent_bytes + (total - high_experts + 1) * low


def load(store: Path, **options: Any) -> Any:
    config = DynaExqConfig(mode="dynaexq", high=HIGH, low=LOW, expert_memory=budget(store), drive="replay", **options)
    return load_model(store, config, torch.float32)


def high_mask(runtime: ExpertRuntime) -> Any:
    shape = runtime.experts.shape
    window, words = runtime.experts.handles.pin()
    mask = np.array([decode_handle(int(word)).format_index == 0 for word in words])
    runtime.experts.handles.release(window)
    return mask.reshape(shape.layers, shape.experts)


def profile(store: Path, path: Path, seed: int = 1) -> np.ndarray:
    opened = ExpertStore.open(store)
    sums = np.random.default_rng(seed).random((opened.shape.layers, opened.shape.experts))
    TrafficProfile.of(opened.fingerprint, "count", sums, 1, []).save(path)
    return sums


def test_a_static_map_puts_the_hottest_high_and_leaves_them(store: Path, tmp_path: Path) -> None:
    sums = profile(store, tmp_path / "map.json")
    config = DynaExqConfig(
        mode="static-map", high=HIGH, low=LOW, expert_memory=budget(store), profile=str(tmp_path / "map.json")
    )
    model = load_model(store, config, torch.float32)
    runtime = runtime_of(model)
    mask = high_mask(runtime)
    assert mask.sum() == 4  # no block is spare, and one low block does not pay for a high one
    assert np.array_equal(mask, pick_hottest(sums, mask.sum(1)))
    with torch.inference_mode():
        model(IDS)
    assert np.array_equal(high_mask(runtime), mask)
    assert runtime.experts.expert_bytes <= budget(store)
    assert 0 < runtime.hot_share_high < 1
    runtime.experts.check_integrity()


def test_a_map_of_another_model_stops_the_start(store: Path, tmp_path: Path) -> None:
    TrafficProfile.of("other", "count", np.ones((2, 8)), 1, []).save(tmp_path / "map.json")
    config = DynaExqConfig(
        mode="static-map", high=HIGH, low=LOW, expert_memory=budget(store), profile=str(tmp_path / "map.json")
    )
    with pytest.raises(StoreError, match="another model"):
        load_model(store, config, torch.float32)
    with pytest.raises(StoreError, match="another model"):
        load(store, ranking=str(tmp_path / "map.json"))
    with pytest.raises(OptionError, match="go together"):
        DynaExqConfig(mode="static-map", high=HIGH, low=LOW, expert_memory=1)


def test_a_ranking_decides_the_first_high_set(store: Path, tmp_path: Path) -> None:
    sums = profile(store, tmp_path / "ranking.json")
    runtime = runtime_of(load(store, ranking=str(tmp_path / "ranking.json")))
    mask = high_mask(runtime)
    assert np.array_equal(mask, pick_hottest(sums, mask.sum(1)))
    assert runtime.counters.promotions == 0
    assert runtime.control is not None
    assert runtime.control.hotness.sums.mean(1) == pytest.approx([1.0, 1.0])


def test_hotness_survives_a_restart(store: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    profile(store, tmp_path / "ranking.json", seed=2)
    first = load(store, state=str(state), ranking=str(tmp_path / "ranking.json"))
    assert not state.exists()
    with torch.inference_mode():
        for _ in range(3):
            first(IDS)
    runtime = runtime_of(first)
    runtime.close()
    runtime.close()
    second = runtime_of(load(store, state=str(state), ranking=str(tmp_path / "ranking.json")))
    assert second.control is not None and runtime.control is not None
    assert np.array_equal(second.control.hotness.sums, runtime.control.hotness.sums)
    mask = high_mask(second)
    assert np.array_equal(mask, pick_hottest(runtime.control.hotness.scores, mask.sum(1)))


@pytest.mark.parametrize("damage", ["cut", "foreign", "other signal"])
def test_a_state_that_does_not_fit_is_ignored_with_a_warning_and_replaced(
    store: Path, tmp_path: Path, damage: str
) -> None:
    state = tmp_path / "state.json"
    profile(store, state)
    if damage == "cut":
        state.write_text(state.read_text()[:-20])
    elif damage == "other signal":
        loaded = TrafficProfile.model_validate_json(state.read_text())
        TrafficProfile.of(loaded.fingerprint, "mass", loaded.sums, 1, []).save(state)
    else:
        TrafficProfile.of("other", "count", np.ones((2, 8)), 1, []).save(state)
    with pytest.warns(UserWarning, match=r"state\.json (is|holds) .* it is ignored"):
        model = load(store, state=str(state))
    runtime = runtime_of(model)
    assert runtime.control is not None
    assert not runtime.control.hotness.sums.any()
    with torch.inference_mode():
        model(IDS)
    runtime.close()
    opened = ExpertStore.open(store)
    assert TrafficProfile.load(state, opened.fingerprint, opened.shape).sums.any()


def test_a_state_that_cannot_be_written_is_a_warning(store: Path, tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    model = load(store, state=str(directory / "state.json"))
    directory.rmdir()
    with torch.inference_mode():
        model(IDS)
    with pytest.warns(UserWarning, match="hotness is not kept"):
        runtime_of(model).close()


def test_threads_end_with_their_model(store: Path) -> None:
    def running() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("dynaexq-")}

    gc.collect()
    before = running()
    config = DynaExqConfig(mode="dynaexq", high=HIGH, low=LOW, expert_memory=budget(store))
    model = load_model(store, config, torch.float32)
    assert running() - before == {"dynaexq-control", "dynaexq-copy"} - before
    with torch.inference_mode():
        model(IDS)
    del model
    gc.collect()
    assert running() == before


def serve_until_killed(store: Path, state: Path, memory: int) -> None:
    """Child process: forwards without end, hotness saved after each."""
    dynaexq.control.SAVE_SECONDS = 0.0
    tuning = {"first_interval": 0.001, "interval": 0.001}
    config = DynaExqConfig(mode="dynaexq", high=HIGH, low=LOW, expert_memory=memory, state=str(state), tuning=tuning)
    model = load_model(store, config, torch.float32)
    with torch.inference_mode():
        while True:
            model(torch.randint(3, 256, (1, 16)))


def test_a_killed_process_leaves_a_whole_state(store: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    opened = ExpertStore.open(store)
    routed = 0
    for _ in range(2):
        child = SPAWN.Process(target=serve_until_killed, args=(store, state, budget(store)), daemon=True)
        child.start()
        for _ in range(20):  # killed somewhere in the middle of many saves
            written = state.stat().st_mtime_ns if state.exists() else 0
            while (state.stat().st_mtime_ns if state.exists() else 0) == written:
                assert child.is_alive()
                time.sleep(0.002)  # leaves the core to the child's imports
        child.kill()
        child.join()
        found = TrafficProfile.load(state, opened.fingerprint, opened.shape)
        assert found.routed > 0
        routed = max(routed, found.routed)
    model = load(store, state=str(state))
    assert runtime_of(model).control is not None
