from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dynaexq.core import ExpertKey, MemoryLimitError, StoreError, decode_handle
from dynaexq.device import CpuDevice
from dynaexq.formats import decode
from dynaexq.residency import BudgetTracker, ResidentExperts
from dynaexq.store import ExpertStore, PrepareOptions, prepare_store
from dynaexq.store.layer_file import layer_path
from support.files import flip_byte, silent
from support.sources import SHAPE, RandomSource


@pytest.fixture
def store(random_source: RandomSource, tmp_path: Path) -> ExpertStore:
    prepare_store(random_source, tmp_path / "store", PrepareOptions(("int4", "bf16"), 32, "rtn"), silent)
    opened = ExpertStore.open(tmp_path / "store")
    opened.require_tier("int4")
    opened.require_tier("bf16")
    return opened


def mixed_tiers() -> dict[ExpertKey, str]:
    return {key: "bf16" if (key.layer + key.expert) % 3 == 0 else "int4" for key in SHAPE.expert_keys()}


def test_every_handle_resolves_to_its_own_version(store: ExpertStore, random_source: RandomSource) -> None:
    budget = BudgetTracker(1 << 20)
    experts = ResidentExperts(store, mixed_tiers(), CpuDevice(), budget)
    experts.load(lambda done, total: None)
    experts.check_integrity()
    window, words = experts.handles.pin()
    for key, tier in mixed_tiers().items():
        handle = decode_handle(int(words[SHAPE.index(key)]))
        fmt = experts.formats[handle.format_index]
        assert fmt.name == tier
        found = decode(experts.block(handle), fmt, SHAPE.expert)
        exact = random_source.read(key)
        for matrix, expected in zip(found, exact, strict=True):
            close = 0.0 if tier == "bf16" else 0.3
            assert torch.allclose(matrix, expected.to(torch.float32), atol=close)
    experts.handles.release(window)
    sizes = {tier: store.manifest.tiers[tier].extent_bytes for tier in ("int4", "bf16")}
    assert budget.used == experts.expert_bytes == sum(sizes[tier] for tier in mixed_tiers().values())
    assert experts.bits_per_weight == pytest.approx(experts.expert_bytes * 8 / SHAPE.weights)


def test_nothing_is_allocated_above_the_budget(store: ExpertStore) -> None:
    class NoDevice(CpuDevice):
        def allocate(self, nbytes: int) -> object:  # type: ignore[override]
            raise AssertionError("allocated")

    need = 12 * store.manifest.tiers["int4"].extent_bytes
    with pytest.raises(MemoryLimitError, match=f"experts needs {need} bytes"):
        ResidentExperts(store, dict.fromkeys(SHAPE.expert_keys(), "int4"), NoDevice(), BudgetTracker(need - 1))


def test_a_damaged_version_stops_the_load(store: ExpertStore) -> None:
    flip_byte(layer_path(store.root, 2, "int4"), -1)
    experts = ResidentExperts(store, dict.fromkeys(SHAPE.expert_keys(), "int4"), CpuDevice(), BudgetTracker(1 << 20))
    with pytest.raises(StoreError, match=r"expert 3 \(layer 2\) do not match"):
        experts.load(lambda done, total: None)
