"""A store that says what versions lose is served on a ladder of all its tiers, within the bytes it was given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynaexq.core import MemoryLimitError
from dynaexq.launch import Opened
from dynaexq.launch_options import LaunchOptions
from dynaexq.llm import LLM
from dynaexq.plan.memory import Workload
from dynaexq.residency.versions import VersionedExperts
from dynaexq.store import ExpertStore
from dynaexq.store.sensitivity import Sensitivity
from dynaexq.traffic import TrafficProfile

MIB = 1 << 20
TIERS = ("int2", "int4", "int8", "bf16")
FLOOR = 6 * MIB
WORK = Workload(64, 64, 1, 1, 4, kv_cache=True)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Sensitivity:
    """Every store says what the embedded model's versions lose, or so."""
    random = np.random.default_rng(0)
    losses = np.array([1e-3, 6e-5, 1e-6, 0.0]) * random.uniform(0.5, 2.0, (6, 32, 1))
    sensitivity = Sensitivity(TIERS, losses, random.gamma(0.5, 0.25, (6, 32)), np.ones(6), ())
    monkeypatch.setattr(ExpertStore, "sensitivity", sensitivity)
    return sensitivity


def plan(store: Path, **options: Any) -> Any:
    return Opened(str(store)).plan(LaunchOptions(**options), WORK)


def test_bytes_go_from_the_lowest_to_the_highest_tier(embedded_store: Path, known: Sensitivity) -> None:
    for mode in ("auto", "dynaexq"):
        made = plan(embedded_store, mode=mode, expert_memory=12 * MIB)
        assert (made.mode, made.tier) == ("dynaexq", "int2") and made.versions.tiers == ("int8", "int4", "int2")
        assert made.expert_bytes == made.versions.pools.nbytes <= 12 * MIB
    assert plan(embedded_store, mode="auto", expert_memory=40 * MIB).mode == "full"


@pytest.mark.parametrize("extra", [0, 40_000, 80_000, 150_000, 400_000])
def test_small_budgets_get_shorter_ladders(embedded_store: Path, known: Sensitivity, extra: int) -> None:
    made = plan(embedded_store, mode="auto", expert_memory=FLOOR + extra)
    assert made.expert_bytes <= FLOOR + extra
    assert (made.mode == "static") is (extra < 60_000)  # a spare block of 32 KiB, and one expert higher
    if made.mode == "static":
        with pytest.raises(MemoryLimitError, match="all experts fit at int2, but not one more at int4 beside them"):
            plan(embedded_store, mode="dynaexq", expert_memory=FLOOR + extra)


def test_people_can_have_two_tiers(embedded_store: Path, known: Sensitivity) -> None:
    by_layer = plan(embedded_store, mode="dynaexq", expert_memory=12 * MIB, tune={"slots": "layer"})
    assert by_layer.versions.tiers == ("int8", "int4") and not by_layer.versions.over_model
    keep = plan(embedded_store, mode="dynaexq", expert_memory=12 * MIB, tune={"layout": "keep"})
    assert keep.versions.tiers == ("int8", "int4") and keep.versions.pools.keep_low


def test_a_ladder_serves_and_says_what_it_holds(embedded_store: Path, known: Sensitivity, tmp_path: Path) -> None:
    with LLM(
        str(embedded_store), slots=1, context=256, mode="dynaexq", expert_memory="12M", tune={"shadow": "on"}
    ) as llm:
        assert llm.generate("reverse: a b c", max_tokens=12).text
        runtime = llm.launch.runtime
        experts, report = runtime.experts, llm.launch.report()
        assert isinstance(experts, VersionedExperts)
        counts = np.bincount(experts.levels().ravel(), minlength=3).tolist()
        assert counts[:2] <= [*report["slots"].values()] and report["slots_shared_by"] == "model"
        assert report["expert_bytes"] <= 12 * MIB and report["signals"]["shadow"] is not None
    experts.check_integrity()


def test_a_map_has_the_bytes_it_was_given(embedded_store: Path, known: Sensitivity, tmp_path: Path) -> None:
    fingerprint, profile = ExpertStore.open(embedded_store).fingerprint, tmp_path / "map.json"
    for traffic in (known.traffic, np.zeros((6, 32))):
        TrafficProfile.of(fingerprint, "count", traffic, 0, []).save(profile)
        options: dict[str, Any] = {"mode": "static-map", "profile": profile, "expert_memory": "9M"}
        with LLM(str(embedded_store), slots=1, context=128, **options) as llm:
            assert llm.generate("reverse: a b c", max_tokens=4).text
            assert 8.8 * MIB < llm.launch.runtime.experts.expert_bytes <= 9 * MIB
