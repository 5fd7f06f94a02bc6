"""Caches in virtual time: the engine's own hits and misses, and the bound that no cache beats."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaexq.core import ExpertShape, ModelShape, OptionError
from dynaexq.formats import VersionLayout
from dynaexq.llm import LLM
from dynaexq.policy.caching import CACHE_POLICIES, CacheMap
from dynaexq.simulate import cache as caches
from dynaexq.simulate.cache import Belady, SimulatedCache
from dynaexq.simulate.costs import Line, StepCosts
from dynaexq.simulate.feed import Asked
from dynaexq.simulate.options import SimulationOptions
from dynaexq.simulate.report import simulate
from dynaexq.simulate.trace_source import open_source
from dynaexq.store import ExpertStore
from dynaexq.traffic.trace import TraceReader

COSTS = StepCosts(decode=Line(start=0.001), prefill=Line(start=0.002))
TEXTS = ("reverse: a b c", "def f(x):", "There are many boxes with coins. " * 3)


def misses_of(policy: str, needs: list[list[int]], size: int, capacity: int) -> int:
    timed = [(np.array(sorted(set(each))), when) for when, each in enumerate(needs)]
    cache = CacheMap(size, capacity, Belady(size, timed) if policy == "belady" else CACHE_POLICIES[policy](size, 1))
    for places, _ in timed:
        missing, victims = cache.need(places)
        cache.admit(missing)
        assert not cache.resident[victims].any() and cache.resident.sum() <= capacity and cache.resident[places].all()
    assert cache.hits + cache.misses == sum(len(places) for places, _ in timed)
    return cache.misses


def fewest_misses(needs: list[list[int]], capacity: int) -> int:
    """By trying everything: sets that can be resident, and the fewest misses that lead there."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for each in needs:
        needed, following = frozenset(each), {}
        for resident, misses in states.items():
            others, total = resident - needed, misses + len(needed - resident)
            for count in range(min(len(others), capacity - len(needed)) + 1):
                for kept in combinations(sorted(others), count):
                    state = needed | frozenset(kept)
                    following[state] = min(total, following.get(state, total))
        states = following
    return min(states.values())


@given(needs=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=2), max_size=10), capacity=st.integers(2, 4))
@settings(max_examples=80, deadline=None)
def test_nothing_misses_less_than_belady(needs: list[list[int]], capacity: int) -> None:
    least = misses_of("belady", needs, 6, capacity)
    assert least == fewest_misses(needs, capacity)
    assert all(misses_of(policy, needs, 6, capacity) >= least for policy in CACHE_POLICIES)


@pytest.mark.parametrize("mode", sorted(CACHE_POLICIES))
@pytest.mark.parametrize("capacity", [60, 10])
def test_the_engine_and_the_simulator_miss_the_same(
    embedded_store: Path, tmp_path: Path, mode: str, capacity: int
) -> None:
    opened = ExpertStore.open(embedded_store)
    memory = capacity * VersionLayout.of(opened.format("int4"), opened.shape.expert).extent_bytes
    path = tmp_path / "run.parquet"
    with LLM(
        str(embedded_store), slots=1, context=128, mode=mode, tier="int4", expert_memory=memory, trace=path
    ) as llm:
        for text in TEXTS:
            llm.generate(text, max_tokens=12)
        found, moved = llm.launch.runtime.describe_cache(), llm.launch.runtime.counters.bytes_moved
    reader = TraceReader.open(path)
    reports = {}
    for each in (mode, "belady"):
        options = SimulationOptions(each, tier="int4", expert_memory=memory, link=1e9, latency=1e-4)
        reports[each] = simulate(open_source(reader.head, embedded_store, None), options, COSTS, reader)
    cache = reports[mode].cache
    assert found is not None and cache == {name: found[name] for name in cache}
    assert reports[mode].bytes_moved == moved > 0
    assert reports[mode].wait_seconds == pytest.approx(moved / 1e9 + 1e-4 * reports[mode].waits)
    assert reports[mode].seconds > reports[mode].wait_seconds > reports["belady"].wait_seconds
    assert reports["belady"].expert_bytes == memory and reports["belady"].by_tier == [1.0]


def test_passes_that_need_more_than_there_is_run_in_groups() -> None:
    shape = ModelShape(2, 4, ExpertShape(64, 32))
    cache = SimulatedCache(shape, CacheMap(8, 3, CACHE_POLICIES["lru"](8, 2)), 100, 1000.0, 0.5)
    end = cache.run(Asked(np.array([1, 1, 1, 1, 0, 0, 0, 2]), 6), start=1.0, seconds=2.0)
    assert cache.map.misses == 5 and cache.counters.waits == 3 and end == pytest.approx(1 + 2 + 3 * 0.5 + 5 * 0.1)
    assert cache.expert_bytes == 300


def test_what_is_too_long_to_be_known_ahead_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "MAX_NEEDS", 3)
    with pytest.raises(OptionError, match="cut the trace"):
        Belady(4, [(np.array([0, 1]), 0), (np.array([2, 3]), 1)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tier": None}, "--tier and --mode"),
        ({"expert_memory": None}, "needs --expert-memory"),
        ({"high": "int8"}, "--high does nothing"),
        ({"drag": 0.5}, "do nothing where versions stay"),
        ({"drive": "replay"}, "--drive does nothing"),
        ({"tune": {"alpha": 0.5}}, "--tune does nothing"),
    ],
)
def test_useless_options_are_refused(changes: dict[str, object], words: str) -> None:
    values = {"mode": "lru", "tier": "int4", "expert_memory": 1 << 20, **changes}
    with pytest.raises(OptionError, match=words):
        SimulationOptions(**values).check()  # type: ignore[arg-type]
