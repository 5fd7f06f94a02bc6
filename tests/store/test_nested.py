"""Stores with nested tiers: made for the base that is on disk, bound to its very bytes, restored together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dynaexq.core import ExpertKey, StoreError
from dynaexq.formats import ExpertWeights, decode
from dynaexq.formats.codec import Base
from dynaexq.store import ExpertStore, PrepareOptions, prepare_store, writer
from dynaexq.store.layer_file import layer_path, read_extent_of
from dynaexq.store.reader import open_tier
from support.files import contents, flip_byte, silent
from support.sources import SHAPE, RandomSource

OPTIONS = PrepareOptions(("int4+4",), group_size=32)


def read(store: ExpertStore, key: ExpertKey, tier: str) -> torch.Tensor:
    store.require_tier(tier)
    nbytes = store.manifest.tiers[tier].extent_bytes
    memory = np.zeros(nbytes + 4096, np.uint8)
    block = memory[-memory.ctypes.data % 4096 :][:nbytes]
    store.read_into(key, tier, block)
    return torch.from_numpy(block)


def distance(exact: ExpertWeights, found: ExpertWeights) -> float:
    lost = sum(float((a.float() - b).square().sum()) for a, b in zip(exact, found, strict=True))
    return (lost / sum(float(each.float().square().sum()) for each in exact)) ** 0.5


def test_a_nested_tier_brings_its_base_along_and_refines_it(random_source: RandomSource, tmp_path: Path) -> None:
    prepare_store(random_source, tmp_path / "store", OPTIONS, silent)
    store = ExpertStore.open(tmp_path / "store")
    assert set(store.manifest.tiers) == {"int4", "int4+4"}
    low, high = store.format("int4"), store.format("int4+4")
    for key in SHAPE.expert_keys():
        exact, base, rest = random_source.read(key), read(store, key, "int4"), read(store, key, "int4+4")
        refined = decode(rest, high, SHAPE.expert, Base(base, low))
        assert distance(exact, refined) < 0.4 * distance(exact, decode(base, low, SHAPE.expert))
        assert distance(exact, refined) == pytest.approx(store.errors("int4+4")[key.layer][key.expert], rel=1e-4)


def test_the_disk_must_have_room_for_the_base_too(
    random_source: RandomSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_store(random_source, tmp_path / "there", OPTIONS, silent)
    sizes = [path.stat().st_size for path in (tmp_path / "there" / "experts").glob("*.int4+4.*")]
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: type("usage", (), {"free": sum(sizes) + 40_000})())
    with pytest.raises(StoreError, match="bytes free"):
        prepare_store(random_source, tmp_path / "new", OPTIONS, silent)


def test_it_can_be_added_to_what_is_there(random_source: RandomSource, tmp_path: Path) -> None:
    prepare_store(random_source, tmp_path / "once", PrepareOptions(("int4", "int8", "int4+4"), 32), silent)
    for tiers in (("int8",), ("int4",), ("int4+4",)):
        prepare_store(random_source, tmp_path / "steps", PrepareOptions(tiers, 32), silent)
    one, two = contents(tmp_path / "once"), contents(tmp_path / "steps")
    assert {name: data for name, data in one.items() if "experts" in name} == {
        name: data for name, data in two.items() if "experts" in name
    }


def test_a_base_that_is_made_again_takes_its_nested_tier_along(random_source: RandomSource, tmp_path: Path) -> None:
    root = tmp_path / "store"
    prepare_store(random_source, root, OPTIONS, silent)
    finished = contents(root)
    flip_byte(layer_path(root, 1, "int4"), -1)
    prepare_store(random_source, root, OPTIONS, silent)
    assert contents(root) == finished


def test_what_refines_other_versions_is_refused(random_source: RandomSource, tmp_path: Path) -> None:
    root, other = tmp_path / "store", tmp_path / "other"
    prepare_store(random_source, root, PrepareOptions(("int4+4",), 32, "als"), silent)
    prepare_store(random_source, other, PrepareOptions(("int4",), 32, "rtn"), silent)
    manifest = ExpertStore.open(root).manifest
    stranger = layer_path(other, 2, "int4").read_bytes().replace(b'"quantizer":"rtn"', b'"quantizer":"als"')
    layer_path(root, 2, "int4").write_bytes(stranger)  # a whole file, as if of this store
    read_extent_of(open_tier(root, manifest, 2, "int4"), 0)
    with pytest.raises(StoreError, match="refines other int4 versions than those of the store"):
        ExpertStore.open(root).require_tier("int4+4")
    prepare_store(random_source, root, PrepareOptions(("int4+4",), 32, "als"), silent)
    ExpertStore.open(root).require_tier("int4+4")
