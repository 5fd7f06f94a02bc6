from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.core import ExpertShape, MemoryLimitError, ModelShape, OptionError
from dynaexq.plan.memory import ModelProfile, Workload, choose_tier, expert_bytes, fixed_parts, format_bytes
from dynaexq.plan.sizes import parse_size

SHAPE = ModelShape(4, 8, ExpertShape(256, 128))
TIERS = ("bf16", "int2", "int8", "int4")
FIXED = {"process": 1000, "dense weights": 500}
PROFILE = ModelProfile(
    SHAPE, 10_000, 1_000, ((64, 96), (32, 64)), ((8, 32),), 256, 4096, 1024, 512, 8, 1, 0, 256, 512, 0
)


@given(st.integers(0, 10 << 20), st.none() | st.integers(0, 10 << 20))
def test_the_plan_fits_and_no_better_tier_would(memory: int, expert_memory: int | None) -> None:
    def fits(tier: str) -> bool:
        size = expert_bytes(SHAPE, tier, 64)
        return size + 1500 <= memory and (expert_memory is None or size <= expert_memory)

    try:
        plan = choose_tier(SHAPE, TIERS, 64, FIXED, memory, expert_memory, "auto")
    except MemoryLimitError:
        assert not fits("int2")
        return
    assert fits(plan.tier)
    assert plan.total <= plan.limit <= memory
    assert plan.expert_bytes == expert_bytes(SHAPE, plan.tier, 64)
    assert not any(fits(tier) for tier in TIERS if expert_bytes(SHAPE, tier, 64) > plan.expert_bytes)
    assert plan.mode == ("full" if plan.tier == "bf16" else "static")


def test_the_floor_is_said_and_works() -> None:
    with pytest.raises(MemoryLimitError, match="below the floor") as error:
        choose_tier(SHAPE, TIERS, 64, FIXED, 2000, None, "auto")
    assert "experts at int2" in str(error.value)
    found = re.search(r"\((\d+) bytes", str(error.value))
    assert found is not None
    floor = int(found[1])
    assert choose_tier(SHAPE, TIERS, 64, FIXED, floor, None, "auto").tier == "int2"
    with pytest.raises(MemoryLimitError):
        choose_tier(SHAPE, TIERS, 64, FIXED, floor - 1, None, "auto")


def test_the_expert_floor_is_said() -> None:
    with pytest.raises(MemoryLimitError, match=r"expert memory limit 1.0 KiB is below the floor 1.0 MiB"):
        choose_tier(SHAPE, TIERS, 64, FIXED, 1 << 30, 1024, "auto")


@given(st.integers(1, 512), st.integers(1, 1024), st.booleans())
def test_more_work_never_needs_less(tokens: int, context: int, cache: bool) -> None:
    small = fixed_parts(PROFILE, Workload(tokens, context, 1, 1, 4, cache), 1000)
    large = fixed_parts(PROFILE, Workload(tokens + 1, context + 1, 2, 2, 4, True), 1000)
    assert all(small[part] <= large[part] for part in small)
    assert (small["KV cache"] > 0) is cache


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1024", 1024),
        ("700M", 700 << 20),
        ("1.5GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        (" 16 kib ", 16384),
        ("1t", 1 << 40),
    ],
)
def test_sizes_people_type(text: str, nbytes: int) -> None:
    assert parse_size(text, "--memory") == nbytes


@pytest.mark.parametrize("text", ["", "M", "-5M", "5X", "0", "0.1", "1e9", "nan", "5 M B"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError, match="--memory .* is no size"):
        parse_size(text, "--memory")


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (5, 1536, 5 << 20, 3 << 29)] == ["5 B", "1.5 KiB", "5.0 MiB", "1.50 GiB"]
