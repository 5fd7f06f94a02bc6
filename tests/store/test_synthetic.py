"""Stores of random weights: whole, of the promised size, the same for the same seed, resumable."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dynaexq.core import ExpertShape, ModelShape, OptionError, StoreError
from dynaexq.formats import TIERS, decode, tier_format
from dynaexq.formats.base import base_tier
from dynaexq.formats.layout import VersionLayout
from dynaexq.store import ExpertStore, PrepareOptions, synthetic
from dynaexq.store.layer_file import layer_path
from dynaexq.store.noise import RandomTensor, RandomVersions, open_stream
from dynaexq.store.routing import MOST, fit_biases, profile_shares, selection_rates, zipf_shares
from dynaexq.store.synthetic import SyntheticModel, write_synthetic
from support.files import contents, flip_byte, silent

SHAPE = ModelShape(2, 4, ExpertShape(128, 64))
OPTIONS = PrepareOptions(("int4", "bf16"), group_size=32)
MODEL = SyntheticModel(
    name="test",
    model_type="qwen3_moe",
    layer_names=["first", "second"],
    shape=SHAPE,
    depth=2,
    seed=7,
    tensors={
        "norm.weight": RandomTensor((128,), fill=1.0),
        "counts": RandomTensor((3,), dtype="I64"),
        "embed.weight": RandomTensor((3000, 128), 1.0, first=np.full(3000, 8.0)),
    },
    files={"config.json": b"{}", "tokenizer.json": b"[]"},
    recipe={},
)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    write_synthetic(MODEL, tmp_path / "finished", OPTIONS, silent)
    return tmp_path / "finished"


@pytest.mark.parametrize("tier", [tier for tier in TIERS if base_tier(tier) is None])
def test_versions_are_valid_fresh_and_of_the_promised_size(tier: str) -> None:
    fmt, shape = tier_format(tier, 64), ExpertShape(512, 384)
    versions = RandomVersions(fmt, shape, 0.5, open_stream(1))
    blocks = [torch.from_numpy(versions.draw().copy()) for _ in range(4)]
    layout = VersionLayout.of(fmt, shape)
    weights = [decode(block, fmt, shape) for block in blocks]
    for index, (section, scale) in enumerate(zip(layout.sections, (1, 1, 0.5), strict=True)):
        together = torch.cat([each[index] for each in weights], 1)
        assert torch.isfinite(together).all()
        assert float(together.std()) == pytest.approx(scale * section.columns**-0.5, rel=0.02)
        assert abs(float(together.mean())) < 0.02 * float(together.std())
        rows = together.std(1)
        assert 1.25 < float(rows.max() / rows.min()) < 2.2  # 1.25 / 0.75, and sampling noise
    assert abs(float(torch.corrcoef(torch.stack([each.gate.reshape(-1) for each in weights[:2]]))[0, 1])) < 0.02
    end = layout.down.offset + layout.down.nbytes
    assert not blocks[-1][end:].any()


@pytest.mark.parametrize("tier", ["int2+2", "int4+4"])
def test_nested_versions_are_random_residuals(tier: str) -> None:
    fmt, shape = tier_format(tier, 64), ExpertShape(512, 384)
    versions = RandomVersions(fmt, shape, 0.5, open_stream(1))
    one, two = versions.draw().copy(), versions.draw().copy()
    layout = VersionLayout.of(fmt, shape)
    end = layout.down.offset + layout.down.nbytes
    assert not one[end:].any() and not two[end:].any()
    assert 0.99 < float((one[:end] != two[:end]).mean()) <= 1
    assert abs(float(one[:end].mean()) - 127.5) < 1


def test_int8_codes_stay_above_what_kernels_negate() -> None:
    fmt, shape = tier_format("int8", 64), ExpertShape(256, 128)
    block = RandomVersions(fmt, shape, 1.0, open_stream(2)).draw()
    section = VersionLayout.of(fmt, shape).gate
    records = block[section.offset : section.offset + section.nbytes].reshape(-1, 64 * 8 + 16)
    assert records[:, :512].view(np.int8).min() == -127
    assert records[:, :512].view(np.int8).max() == 127


def test_dense_tensors_are_normal_in_chunks() -> None:
    tensor = MODEL.tensors["embed.weight"]
    chunks = list(tensor.chunks(open_stream(3)))
    assert len(chunks) > 1
    values = torch.from_numpy(np.concatenate(chunks)).view(torch.bfloat16).reshape(tensor.shape).float()
    assert (values[:, 0] == 8).all()
    assert float(values[:, 1:].std()) == pytest.approx(1, rel=0.01)
    assert float((values[:, 1:].abs() < 1).float().mean()) == pytest.approx(0.6827, abs=0.01)
    odd = np.concatenate(list(RandomTensor((3, 5), 1.0).chunks(open_stream(3))))
    assert len(odd) == 3 * 5 * 2


def test_a_store_is_whole_and_finds_itself_again(finished: Path) -> None:
    store = ExpertStore.open(finished)
    store.verify_dense()
    assert not store.damaged_files()
    assert not [
        store.damaged(layer, tier) for layer in range(2) for tier in OPTIONS.tiers if store.damaged(layer, tier)
    ]
    assert store.errors("int4") == [[0.0] * 4] * 2
    assert store.manifest.source == "synthetic test"
    dense = load_file(finished / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in dense.items()} == {
        "norm.weight": torch.bfloat16,
        "embed.weight": torch.bfloat16,
        "counts": torch.int64,
    }
    stamps = {path: path.stat().st_mtime_ns for path in finished.rglob("*.safetensors")}
    _, written = write_synthetic(MODEL, finished, OPTIONS, silent)
    assert written == 0
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*.safetensors")} == stamps


def test_the_seed_decides_every_byte(finished: Path, tmp_path: Path) -> None:
    for tier in OPTIONS.tiers:  # one after the other gives the same files
        write_synthetic(MODEL, tmp_path / "again", replace(OPTIONS, tiers=(tier,)), silent)
    assert contents(tmp_path / "again") == contents(finished)
    write_synthetic(replace(MODEL, seed=8), tmp_path / "other", OPTIONS, silent)
    before, after = contents(finished), contents(tmp_path / "other")
    same = {name for name in before if before[name] == after[name]}
    assert same == {"config.json", "tokenizer.json", ".dynaexq.lock"}


def test_an_interruption_leaves_whole_files_and_is_gone_on_from(finished: Path, tmp_path: Path) -> None:
    target = tmp_path / "store"

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "experts" and done == 6:  # in the middle of the second layer
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_synthetic(MODEL, target, OPTIONS, interrupt)
    assert not list(target.rglob("*.partial"))
    first = layer_path(target, 0, "int4")
    assert [path.name for path in (target / "experts").iterdir()] == [first.name]
    stamp = first.stat().st_mtime_ns
    (target / "model.safetensors.partial").write_bytes(b"left by a killed run")
    _, written = write_synthetic(MODEL, target, OPTIONS, silent)
    assert written > 0
    assert first.stat().st_mtime_ns == stamp
    flip_byte(first, -9000)
    write_synthetic(MODEL, target, OPTIONS, silent)
    assert contents(target) == contents(finished)


def test_what_is_refused(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(finished)
    with pytest.raises(StoreError, match=r"is a store of another checkpoint \('synthetic test'\)"):
        write_synthetic(replace(MODEL, seed=8), finished, OPTIONS, silent)
    with pytest.raises(StoreError, match="another checkpoint"):
        write_synthetic(MODEL, finished, replace(OPTIONS, group_size=64), silent)
    with pytest.raises(OptionError, match="group size 128 does not divide"):
        write_synthetic(MODEL, tmp_path / "new", replace(OPTIONS, group_size=128), silent)
    assert contents(finished) == before
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"not empty \(it holds thesis.txt\)"):
        write_synthetic(MODEL, foreign, OPTIONS, silent)
    assert contents(foreign) == {"thesis.txt": b"mine"}
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda _: usage(10_000, 0, 10_000))
    with pytest.raises(StoreError, match="has 10000 bytes free, the store needs"):
        write_synthetic(MODEL, tmp_path / "new" / "deep", OPTIONS, silent)
    assert not (tmp_path / "new").exists()
    assert write_synthetic(MODEL, finished, OPTIONS, silent)[1] == 0  # needs no space
    shutil.rmtree(finished)


def test_biases_give_experts_the_wanted_rates() -> None:
    generator = np.random.Generator(open_stream(5))
    shares = zipf_shares(3, 32, generator)
    assert np.allclose(shares.sum(1), 1)
    assert not np.array_equal(shares[0], shares[1])
    biases = fit_biases(shares, 4, generator)
    logits = biases[1] + generator.standard_normal((20_000, 32))
    found = np.bincount(np.argsort(-logits, 1)[:, :4].reshape(-1), minlength=32) / 20_000
    assert np.allclose(found, selection_rates(shares[1], 4), rtol=0.15, atol=0.01)
    assert np.allclose(np.sort(biases[0]), np.sort(biases[2]))


def test_wanted_rates_are_possible_ones() -> None:
    for shares in (np.eye(8)[0], np.full(8, 1 / 8), 1 / np.arange(1, 9) ** 4):
        rates = selection_rates(shares / shares.sum(), 2)
        assert 1.99 < rates.sum() < 2.01
        assert 0 < rates.min() <= rates.max() <= MOST
    assert not fit_biases(np.full((1, 4), 0.25), 4, np.random.Generator(open_stream(6))).any()


def test_profiles_repeat_over_layers() -> None:
    shares = profile_shares(np.array([[1.0, 3.0], [0.0, 0.0]]), 3)
    assert np.allclose(shares, [[0.25, 0.75], [0.5, 0.5], [0.25, 0.75]])
