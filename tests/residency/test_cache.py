"""A cache of experts, whatever is asked of it and whatever fails: reachable bytes are those of the expert asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynaexq.core import ExpertKey, MemoryLimitError, StoreError, decode_handle
from dynaexq.device import CpuDevice
from dynaexq.device.base import Bytes
from dynaexq.formats import ExpertFormat, tier_format
from dynaexq.policy.caching import CACHE_MODES, FLOW
from dynaexq.policy.foresight import CacheMind, ForesightOptions, make_cache_mind, make_flow_mind
from dynaexq.policy.mixing import MISS_POLICIES, WAIT, MixingOptions
from dynaexq.policy.prediction import MovingAverage
from dynaexq.residency import BudgetTracker
from dynaexq.residency.cache import CachedExperts
from dynaexq.residency.mixture import SecondTier
from dynaexq.residency.shelf import ABSENT
from dynaexq.store import ExpertStore, PrepareOptions, prepare_store
from dynaexq.store.layer_file import layer_path
from support.files import flip_byte, silent
from support.sources import SHAPE, RandomSource


def make_mind(mode: str, capacity: int, options: ForesightOptions | None = None) -> Callable[[], CacheMind]:
    if mode != FLOW:
        return partial(make_cache_mind, mode, SHAPE, capacity)
    average = partial(MovingAverage, SHAPE.layers, SHAPE.experts)
    return partial(make_flow_mind, average, SHAPE, capacity, options or ForesightOptions())


EVERYONE = len(SHAPE.expert_keys())
ids = st.lists(st.integers(0, SHAPE.experts - 1), min_size=1, max_size=8)


class CacheMachine(RuleBasedStateMachine):
    """Layers ask for experts, some of which cannot be read."""

    @initialize(
        capacity=st.integers(1, EVERYONE),
        mode=st.sampled_from(CACHE_MODES),
        lookahead=st.integers(0, 3),
        policy=st.sampled_from(MISS_POLICIES),
        low=st.integers(1, 6),
    )
    def begin(self, capacity: int, mode: str, lookahead: int, policy: str, low: int) -> None:
        self.broken: set[ExpertKey] = set()
        self.interrupted = False
        mind = make_mind(mode, capacity, ForesightOptions(lookahead, threshold=0.01))
        mixed = mode == FLOW and policy != WAIT
        second = SecondTier("int2", low, policy, MixingOptions(patience=0.5)) if mixed else None
        self.cache = CachedExperts(
            self,  # type: ignore[arg-type]
            "int4",
            mind,
            CpuDevice(),
            BudgetTracker(1 << 24),
            second=second,
        )

    # the source
    shape, sensitivity, fingerprint = SHAPE, None, "f"

    def format(self, tier: str) -> ExpertFormat:
        return tier_format(tier, 32)

    def read_into(self, key: ExpertKey, tier: str, destination: Bytes) -> None:
        destination[:] = 255  # poison, as half a read leaves
        if self.interrupted and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        if key in self.broken:
            raise StoreError(f"{key} cannot be read")
        destination[:] = SHAPE.index(key) + 100 * (tier == "int2")

    def close(self) -> None:
        """Nothing is open."""

    @rule(layer=st.integers(0, SHAPE.layers - 1), chosen=ids)
    def forward(self, layer: int, chosen: list[int]) -> None:
        words = self.cache.blank_words()[: SHAPE.experts]
        wanted, seen, failed = set(chosen), set(), False
        for group in self.cache.look(layer, np.array(chosen).reshape(-1, 1), None):
            assert 0 < len(group) <= self.cache.map.capacity
            try:
                self.cache.bring(layer, group, words)
            except KeyboardInterrupt:
                self.interrupted, failed = False, True
                break
            except StoreError:
                failed = True
                assert {ExpertKey(layer, int(each)) for each in group} & self.broken
                break
            for expert, word in enumerate(words.tolist()):
                if expert in group:
                    handle = decode_handle(word)
                    block = self.cache.arena.host_view(handle.offset, self.cache.pools[handle.format_index].block_bytes)
                    assert (block == SHAPE.index(ExpertKey(layer, expert)) + 100 * handle.format_index).all()
                    assert self.cache.levels()[layer * SHAPE.experts + expert] == handle.format_index
                else:
                    assert word == ABSENT
            seen |= set(group.tolist())
        assert failed or seen == wanted

    @rule(key=st.sampled_from(SHAPE.expert_keys()))
    def spoil(self, key: ExpertKey) -> None:
        self.broken.add(key)

    @rule()
    def interrupt(self) -> None:
        self.interrupted = True

    @precondition(lambda self: self.broken)
    @rule()
    def mend(self) -> None:
        self.broken.clear()

    @invariant()
    def is_whole(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCache = CacheMachine.TestCase


@pytest.fixture
def store(random_source: RandomSource, tmp_path: Path) -> ExpertStore:
    prepare_store(random_source, tmp_path / "store", PrepareOptions(("int4",), 32, "rtn"), silent)
    opened = ExpertStore.open(tmp_path / "store")
    opened.require_tier("int4")
    return opened


def make_cache(store: ExpertStore, capacity: int, limit: int = 1 << 24) -> CachedExperts:
    return CachedExperts(store, "int4", make_mind("lru", capacity), CpuDevice(), BudgetTracker(limit))


def test_a_damaged_expert_is_an_error_and_never_reachable(store: ExpertStore) -> None:
    flip_byte(layer_path(store.root, 0, "int4"), 5000)
    cache, words = make_cache(store, 4), np.full(SHAPE.experts, ABSENT, np.uint64)
    failures = 0
    for expert in range(SHAPE.experts):
        try:
            cache.bring(0, np.array([expert]), words)
        except StoreError:
            failures += 1
            assert (words == ABSENT).all()
        cache.check_integrity()
    assert failures == cache.counters.failed == 1
    cache.close()


def test_nothing_is_held_beyond_the_budget(store: ExpertStore) -> None:
    extent = store.manifest.tiers["int4"].extent_bytes
    with pytest.raises(MemoryLimitError):
        make_cache(store, 3, 3 * extent - 1)
    cache = make_cache(store, 3, 3 * extent)
    assert cache.expert_bytes == 3 * extent
    cache.close()


def test_counters_say_what_happened(store: ExpertStore) -> None:
    cache, words = make_cache(store, 2), np.full(SHAPE.experts, ABSENT, np.uint64)
    cache.bring(0, np.array([0, 1]), words)
    cache.bring(0, np.array([1]), words)
    cache.bring(1, np.array([0]), words)
    extent = store.manifest.tiers["int4"].extent_bytes
    assert (cache.map.hits, cache.map.misses, cache.counters.evictions, cache.counters.bytes_moved) == (
        1,
        3,
        1,
        3 * extent,
    )
    assert cache.counters.waits == 2 and cache.counters.wait_seconds > 0
    with cache.forgotten():
        cache.bring(1, np.array([1]), words)
    cache.check_integrity()
    assert cache.map.misses == 3 and not cache.map.resident.any() and cache.counters.waits == 2
    cache.close()
