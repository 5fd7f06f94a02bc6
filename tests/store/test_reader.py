"""Loading never hands out wrong bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.core import ExpertKey, StoreError
from dynaexq.device.cpu import CpuArena
from dynaexq.store import MANIFEST_NAME, ExpertStore, PrepareOptions, prepare_store
from dynaexq.store.layer_file import layer_path
from support.files import flip_byte, silent
from support.sources import RandomSource


@pytest.fixture
def root(random_source: RandomSource, tmp_path: Path) -> Path:
    prepare_store(random_source, tmp_path / "store", PrepareOptions(("int4", "bf16"), 32, "rtn"), silent)
    return tmp_path / "store"


def read_all(root: Path, tier: str) -> None:
    store = ExpertStore.open(root)
    store.require_tier(tier)
    arena = CpuArena(store.manifest.tiers[tier].extent_bytes)
    try:
        for key in store.shape.expert_keys():
            store.read_into(key, tier, arena.host_view(0, arena.nbytes))
    finally:
        store.close()


def test_reading_with_and_without_direct_io_gives_the_same_bytes(root: Path) -> None:
    found = []
    for direct in (True, False):
        store = ExpertStore.open(root)
        store.direct_io = direct
        store.require_tier("int4")
        arena = CpuArena(store.manifest.tiers["int4"].extent_bytes)
        store.read_into(ExpertKey(2, 3), "int4", arena.host_view(0, arena.nbytes))
        found.append(arena.host_view(0, arena.nbytes).copy())
        store.close()
    assert np.array_equal(*found)


@given(st.data())
def test_any_flipped_byte_of_an_extent_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    base = tmp_path_factory.getbasetemp() / "flipped"
    if not base.exists():
        source = RandomSource.create(base / "source")
        prepare_store(source, base / "store", PrepareOptions(("int4", "bf16"), 32, "rtn"), silent)
    root = base / "store"
    tier, layer = data.draw(st.sampled_from(["int4", "bf16"])), data.draw(st.integers(0, 2))
    path = layer_path(root, layer, tier)
    extent = ExpertStore.open(root).manifest.tiers[tier].extent_bytes
    position = data.draw(st.integers(1, 4 * extent))
    flip_byte(path, -position)
    try:
        expert = 3 - (position - 1) // extent
        assert ExpertStore.open(root).damaged(layer, tier) == [expert]
        with pytest.raises(
            StoreError, match=rf"{path.name} is damaged: the bytes of expert {expert} \(layer {layer}\)"
        ):
            read_all(root, tier)
    finally:
        flip_byte(path, -position)
    read_all(root, tier)


@pytest.mark.parametrize("position", [0, 9, 60, 200, 400])
def test_a_damaged_header_is_never_trusted(root: Path, position: int) -> None:
    flip_byte(layer_path(root, 1, "int4"), position)
    with pytest.raises(StoreError):
        read_all(root, "int4")


def test_missing_and_short_layer_files(root: Path) -> None:
    path = layer_path(root, 2, "bf16")
    path.write_bytes(path.read_bytes()[:-1024])
    with pytest.raises(StoreError, match="cut short"):
        read_all(root, "bf16")
    path.unlink()
    with pytest.raises(StoreError, match=r"incomplete: .*layer-0002.bf16.safetensors is missing"):
        read_all(root, "bf16")


def test_a_layer_file_of_another_place_is_refused(root: Path) -> None:
    shutil.copy(layer_path(root, 0, "int4"), layer_path(root, 1, "int4"))
    with pytest.raises(StoreError, match=r"belongs to another store: its layer is 'layers.0', not 'layers.1'"):
        read_all(root, "int4")


def test_dense_weights_are_checked(root: Path) -> None:
    flip_byte(root / "model.safetensors", -3)
    with pytest.raises(StoreError, match=r"model.safetensors is damaged: its checksum"):
        ExpertStore.open(root).verify_dense()
    (root / "model.safetensors").write_bytes(b"short")
    with pytest.raises(StoreError, match="cut short"):
        ExpertStore.open(root).verify_dense()


def test_unknown_tier_says_how_to_add_it(root: Path) -> None:
    with pytest.raises(StoreError, match=r"has no tier int2 \(it has int4, bf16\); add it with `dynaexq prepare"):
        ExpertStore.open(root).require_tier("int2")


@pytest.mark.parametrize(("field", "value"), [("store_version", 2), ("layout", "r16.1")])
def test_other_store_versions(root: Path, field: str, value: object) -> None:
    manifest = json.loads((root / MANIFEST_NAME).read_text())
    (root / MANIFEST_NAME).write_text(json.dumps({**manifest, field: value}))
    with pytest.raises(StoreError, match=f"{value}.*Prepare the model again"):
        ExpertStore.open(root)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"store_version": 1}', '{"store_version": 1, "layout": "r8.1"}'])
def test_damaged_manifest(root: Path, text: str) -> None:
    (root / MANIFEST_NAME).write_text(text)
    with pytest.raises(StoreError, match=f"{MANIFEST_NAME} is damaged"):
        ExpertStore.open(root)
    (root / MANIFEST_NAME).unlink()
    with pytest.raises(StoreError, match="is not a store"):
        ExpertStore.open(root)
