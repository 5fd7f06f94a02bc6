"""Models of which only some experts are resident: the same tokens as with all of them, at any size, whatever fails."""

from __future__ import annotations

import shutil
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaexq.core import MemoryLimitError, OptionError, StoreError
from dynaexq.formats import VersionLayout
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.loading import load_model
from dynaexq.llm import LLM
from dynaexq.policy.caching import CACHE_MODES
from dynaexq.server.state import StateView
from dynaexq.store import ExpertStore
from dynaexq.store.layer_file import layer_path
from dynaexq.traffic.trace import TraceReader, join_rows
from support.files import flip_byte

TEXTS = ("reverse: a b c", "sort: d e f g", "There are many boxes with coins. " * 4, "def f(x):")


def extent_of(store: Path, tier: str) -> int:
    opened = ExpertStore.open(store)
    return VersionLayout.of(opened.format(tier), opened.shape.expert).extent_bytes


def answer(store: Path, **options: object) -> tuple[list[tuple[int, ...]], LLM]:
    """Tokens of all TEXTS, which run together."""
    with LLM(str(store), slots=4, context=256, **options) as llm:
        streams = [llm.submit(llm.encoder.encode(text), 16) for text in TEXTS]
        return [tuple(stream.wait().tokens) for stream in streams], llm


@pytest.fixture(scope="module")
def expected(embedded_store: Path) -> list[tuple[int, ...]]:
    return answer(embedded_store, mode="static", tier="int4")[0]


@pytest.mark.parametrize("mode", CACHE_MODES)
@pytest.mark.parametrize("capacity", [192, 60, 17, 5, 1])
def test_tokens_are_those_of_all_experts_resident(
    embedded_store: Path, expected: list[tuple[int, ...]], mode: str, capacity: int
) -> None:
    memory = capacity * extent_of(embedded_store, "int4")
    tokens, llm = answer(embedded_store, mode=mode, tier="int4", expert_memory=memory)
    assert tokens == expected
    runtime, plan = llm.launch.runtime, llm.launch.plan
    assert plan.cached == capacity and plan.expert_bytes == memory and plan.mode == mode
    found = runtime.describe_cache()
    assert found is not None and found["capacity"] == capacity
    assert (found["misses"] <= 192) is (capacity == 192)
    assert runtime.cache is not None
    runtime.cache.check_integrity()


def test_hidden_states_are_those_of_all_experts_resident_with_either_kernel(embedded_store: Path) -> None:
    ids = torch.randint(3, 4000, (2, 30), generator=torch.Generator().manual_seed(0))
    # groups add up in another order, and what differs in the last bit may be rounded to another of 8 bits later
    for kernel, activations, bound in (("native", "int8", 1e-3), ("native", "fp32", 2e-6), ("reference", "fp32", 2e-6)):
        common = {"kernel": kernel, "activations": activations, "tier": "int4"}
        with torch.no_grad():
            whole = load_model(embedded_store, DynaExqConfig(mode="static", **common), torch.float32)(ids).logits
            for capacity in (50, 3):
                memory = capacity * extent_of(embedded_store, "int4")
                config = DynaExqConfig(mode="lru", expert_memory=memory, **common)
                found = load_model(embedded_store, config, torch.float32)(ids).logits
                assert (found - whole).norm() < bound * whole.norm()


def test_forward_passes_of_several_threads_take_turns(embedded_store: Path) -> None:
    config = DynaExqConfig(mode="lfu", tier="int4", expert_memory=20 * extent_of(embedded_store, "int4"))
    model = load_model(embedded_store, config, torch.float32)
    texts = [torch.randint(3, 4000, (1, 12), generator=torch.Generator().manual_seed(each)) for each in range(4)]
    with torch.no_grad():
        alone = [model(text).logits for text in texts]
    together: list[list[torch.Tensor]] = [[] for _ in texts]

    def run(place: int) -> None:
        with torch.no_grad():
            together[place] = [model(texts[place]).logits for _ in range(5)]

    threads = [threading.Thread(target=run, args=(each,)) for each in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, several in zip(alone, together, strict=True):
        assert len(several) == 5 and all(torch.allclose(one, each, atol=1e-4) for each in several)
    cache = runtime_of(model).cache
    assert cache is not None and not cache.turn.locked()
    cache.check_integrity()


def test_a_damaged_expert_fails_its_request_and_no_other(
    embedded_store: Path, tmp_path: Path, expected: list[tuple[int, ...]]
) -> None:

    store = tmp_path / "store"
    shutil.copytree(embedded_store, store)
    memory = 40 * extent_of(store, "int4")
    with LLM(str(store), slots=1, context=256, mode="lru", tier="int4", expert_memory=memory) as llm:
        path = layer_path(store, 3, "int4")
        before = path.read_bytes()
        for expert in range(32):
            flip_byte(path, 4096 + expert * extent_of(store, "int4") + 100)
        with pytest.raises(Exception, match="is damaged"):
            llm.generate(TEXTS[0], max_tokens=4)
        with path.open("r+b") as file:  # the same file, which is open
            file.write(before)
        tokens = llm.submit(llm.encoder.encode(TEXTS[0]), 16).wait().tokens
        assert tuple(tokens) == expected[0]
        assert llm.launch.runtime.counters.failed > 0


def test_a_read_that_fails_inside_a_native_step_is_its_error(
    embedded_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, reads = 30 * extent_of(embedded_store, "int4"), count(1)
    with LLM(str(embedded_store), slots=1, context=256, mode="lru", tier="int4", expert_memory=memory) as llm:
        cache = llm.launch.runtime.cache
        assert cache is not None and llm.launch.runtime.fused_layers == 6
        read = cache._source.read_into

        def fail(*arguments: Any) -> None:
            if next(reads) == 300:  # the prompt needs 192 at most, and is one pass
                raise StoreError("the disk is gone")
            read(*arguments)

        monkeypatch.setattr(cache._source, "read_into", fail)
        llm.encoder.stop_tokens = frozenset()
        with pytest.raises(Exception, match="the disk is gone"):
            llm.submit(llm.encoder.encode(TEXTS[0]), 200).wait()
        assert not cache.turn.locked() and cache.counters.failed == 1
        cache.check_integrity()
        assert len(llm.submit(llm.encoder.encode(TEXTS[0]), 20).wait().tokens) == 20


def test_cached_runs_are_recorded_and_shown(embedded_store: Path, tmp_path: Path) -> None:
    path, memory = tmp_path / "run.parquet", 50 * extent_of(embedded_store, "int4")
    with LLM(
        str(embedded_store), slots=1, context=128, mode="lfu", tier="int4", expert_memory=memory, trace=path
    ) as llm:
        llm.generate(TEXTS[0], max_tokens=4)
        view = StateView.__new__(StateView)
        view.runtime = llm.launch.runtime
        shown = view._describe_experts()
        assert [tier["name"] for tier in shown["tiers"]] == ["int4", "not loaded"]
        assert shown["tiers"][0]["experts"] == 50 and shown["tiers"][1]["experts"] == 142
        assert set("".join(shown["map"])) == {"0", "1"}
    rows = join_rows(list(TraceReader.open(path).batches()))
    assert len(rows.window) > 8 and (rows.expert_bytes > 0).all()


def test_what_makes_no_cache_is_refused(embedded_store: Path) -> None:
    for options, words in (
        ({"mode": "lru"}, "--mode lru needs --tier"),
        ({"mode": "lru", "tier": "int4", "high": "int8", "low": "int2"}, "--high and --low go with"),
        ({"mode": "lfu", "tier": "int4", "tune": {"margin": 0.1}}, "margin does nothing here, where experts are read"),
        ({"mode": "lru", "tier": "int4", "state": Path("x.json")}, "--state goes with"),
    ):
        with pytest.raises(OptionError, match=words):
            LLM(str(embedded_store), **options)
    with pytest.raises(MemoryLimitError, match="less than the 56.0 KiB of one at int4"):
        LLM(str(embedded_store), mode="lru", tier="int4", expert_memory=50_000)
    with pytest.raises(OptionError, match="needs a tier, and expert_memory"):
        DynaExqConfig(mode="lru", tier="int4")


def test_a_slow_link_makes_needs_wait(embedded_store: Path) -> None:
    extent = extent_of(embedded_store, "int4")
    options = {"mode": "lru", "tier": "int4", "expert_memory": 20 * extent, "tune": {"link_gbps": extent * 500 / 1e9}}
    with LLM(str(embedded_store), slots=1, context=64, **options) as llm:
        llm.generate("a", max_tokens=2)
        counters = llm.launch.runtime.counters
        assert counters.wait_seconds >= 0.9 * counters.bytes_moved / extent / 500
