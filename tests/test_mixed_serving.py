"""Caches with low versions: what they compute is what their tiers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynaexq.core import OptionError, StoreError
from dynaexq.formats import VersionLayout
from dynaexq.launch_options import LaunchOptions
from dynaexq.llm import LLM
from dynaexq.store import ExpertStore
from dynaexq.traffic.trace import TraceReader

PROMPTS = ("There are many boxes.", "def f(x):", "reverse: a b c")


def answer(store: Path, slots: int = 2, **options: Any) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    with LLM(str(store), slots=slots, context=128, tier="int4", **options) as llm:
        streams = [llm.submit(llm.encoder.encode(text), 24) for text in PROMPTS]
        found = [stream.wait().tokens for stream in streams]
        cache = llm.launch.runtime.cache
        if cache:
            cache.check_integrity()
        return found, llm.launch.runtime.describe_cache() or {}


def extent(store: Path, tier: str) -> int:
    opened = ExpertStore.open(store)
    return VersionLayout.of(opened.format(tier), opened.shape.expert).extent_bytes


def flow(memory: int, policy: str, **tune: Any) -> dict[str, Any]:
    return {"mode": "expertflow", "expert_memory": memory, "low": "int2", "miss_policy": policy, "tune": tune}


def test_misses_go_to_low_versions_within_the_bytes(embedded_store: Path, tmp_path: Path) -> None:
    memory = 40 * extent(embedded_store, "int4")
    _, found = answer(embedded_store, trace=tmp_path / "low.parquet", **flow(memory, "low"))
    assert found["low_uses"] > 0 and 0 < found["low_share"] < 1 and found["low_loads"] <= found["low_uses"]
    used = found["capacity"] * extent(embedded_store, "int4") + found["low_capacity"] * extent(embedded_store, "int2")
    assert memory - extent(embedded_store, "int4") < used <= memory
    read = [rows.expert_bytes for rows in TraceReader.open(tmp_path / "low.parquet").batches()]
    assert min(each.min() for each in read) < 24 * extent(embedded_store, "int4")  # some of a token's 24 at int2


def test_where_all_are_waited_for_the_tokens_are_the_same(embedded_store: Path) -> None:
    same, _ = answer(embedded_store, mode="static")
    memory = 60 * extent(embedded_store, "int4")
    patient, found = answer(embedded_store, **flow(memory, "auto", patience=1000.0, low_share=0.05))
    assert patient == same and found["low_uses"] == 0


def test_all_low_is_what_the_low_tier_says(embedded_store: Path) -> None:
    """One high block that nobody deserves: every need is a miss that goes low."""
    with LLM(str(embedded_store), slots=1, context=128, mode="static", tier="int2") as llm:
        expected = [llm.submit(llm.encoder.encode(text), 24).wait().tokens for text in PROMPTS]
    room = extent(embedded_store, "int4") + 200 * extent(embedded_store, "int2")
    share = round(min(0.9, 200 * extent(embedded_store, "int2") / room), 6)
    memory = int(200 * extent(embedded_store, "int2") / share) + 64
    low, found = answer(embedded_store, slots=1, **flow(memory, "low", low_share=share, threshold=1.0, lookahead=0))
    assert found["low_share"] == 1.0 and low == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "lfu", "miss_policy": "low"}, "goes with --mode expertflow"),
        ({"mode": "expertflow", "miss_policy": "low"}, "--low TIER goes with"),
        ({"mode": "expertflow", "low": "int2"}, "--low TIER goes with"),
        ({"mode": "expertflow", "low": "int4", "miss_policy": "low"}, "is not above"),
        ({"mode": "expertflow", "low": "int2", "high": "int8", "miss_policy": "low"}, "--high and --low go with"),
        ({"mode": "expertflow", "tune": {"patience": 2.0}}, "patience does nothing"),
        (
            {"mode": "expertflow", "low": "int2", "miss_policy": "low", "tune": {"patience": 2.0}},
            "patience does nothing",
        ),
        ({"mode": "expertflow", "miss_policy": "sometimes"}, "unknown miss policy"),
    ],
)
def test_useless_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        LaunchOptions(tier="int4", expert_memory=1 << 20, **options).check()


def test_a_tier_that_is_not_there_is_named(embedded_store: Path) -> None:
    with pytest.raises(StoreError, match="no tier int3"):
        answer(embedded_store, mode="expertflow", expert_memory=1 << 22, low="int3", miss_policy="low")
