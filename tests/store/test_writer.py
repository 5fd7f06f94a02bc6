"""Preparation: what it writes, what it refuses, and that any interruption can be resumed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dynaexq.core import BLOCK_BYTES, CheckpointError, ExpertKey, OptionError, StoreError
from dynaexq.formats import VersionLayout, encode
from dynaexq.store import ExpertStore, Manifest, PrepareOptions, files, prepare_store, writer
from dynaexq.store.layer_file import layer_path
from support.files import contents, flip_byte, silent
from support.processes import SPAWN
from support.sources import SHAPE, RandomSource

TIERS = ("int2", "int8", "bf16")
OPTIONS = PrepareOptions(TIERS, group_size=32, quantizer="als")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed preparation. Copy it before changing it."""
    base = tmp_path_factory.mktemp("prepared")
    prepare_store(RandomSource.create(base / "source"), base / "store", OPTIONS, silent)
    return base / "store"


@pytest.fixture
def finished(prepared: Path, tmp_path: Path) -> dict[str, bytes]:
    """Files of an undisturbed preparation of `random_source`, one of which is in `finished`."""
    shutil.copytree(prepared, tmp_path / "finished")
    return contents(prepared)


def test_every_expert_is_in_exactly_one_extent_per_tier(random_source: RandomSource, tmp_path: Path) -> None:
    prepare_store(random_source, tmp_path / "store", OPTIONS, silent)
    store = ExpertStore.open(tmp_path / "store")
    for tier in TIERS:
        fmt = store.format(tier)
        for layer in range(SHAPE.layers):
            path = layer_path(tmp_path / "store", layer, tier)
            extents = load_file(path)  # any safetensors reader understands the file
            assert sorted(extents) == [f"expert.{expert}" for expert in range(SHAPE.experts)]
            for expert in range(SHAPE.experts):
                expected = encode(random_source.read(ExpertKey(layer, expert)), fmt, SHAPE.expert, "als")
                assert torch.equal(extents[f"expert.{expert}"], expected.block)
                assert store.errors(tier)[layer][expert] == pytest.approx(expected.error, rel=1e-5)
            extent = VersionLayout.of(fmt, SHAPE.expert).extent_bytes
            assert extent % BLOCK_BYTES == 0
            assert (path.stat().st_size - SHAPE.experts * extent) % BLOCK_BYTES == 0
    dense = load_file(tmp_path / "store" / "model.safetensors")
    assert list(dense) == ["dense.weight"]
    assert torch.equal(dense["dense.weight"], random_source.checkpoint.read("dense.weight"))
    assert (tmp_path / "store" / "tokenizer.json").exists()


def test_a_second_run_changes_nothing_and_tiers_can_be_added(
    random_source: RandomSource, tmp_path: Path, finished: dict[str, bytes]
) -> None:
    target = tmp_path / "store"
    prepare_store(random_source, target, PrepareOptions(("int2",), 32, "als"), silent)
    prepare_store(random_source, target, PrepareOptions(("bf16", "int8"), 32, "als"), silent)
    stamps = {path: path.stat().st_mtime_ns for path in target.rglob("layer-*")}
    prepare_store(random_source, target, OPTIONS, silent)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("layer-*")} == stamps
    found = contents(target)
    assert {k: v for k, v in found.items() if "json" not in k} == {k: v for k, v in finished.items() if "json" not in k}
    assert Manifest.load(target).tiers == Manifest.load(tmp_path / "finished").tiers


def die_after(root: Path, target: Path, writes: int) -> None:
    """Child process: prepare, and be killed at the given write, as by kill -9."""
    left = writes
    write = files.os.write

    def write_then_die(descriptor: int, data: object) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            write(descriptor, memoryview(data)[: len(memoryview(data)) // 2])  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, data)  # type: ignore[arg-type]

    files.os.write = write_then_die  # type: ignore[assignment]
    prepare_store(RandomSource(root), target, OPTIONS, silent)


@pytest.mark.parametrize("writes", [1, 3, 5, 9, 30])
def test_killed_at_any_write_the_next_run_finishes_the_same_store(
    random_source: RandomSource, tmp_path: Path, finished: dict[str, bytes], writes: int
) -> None:
    target = tmp_path / "store"
    child = SPAWN.Process(target=die_after, args=(random_source.checkpoint.root, target, writes))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert list(target.rglob("*.partial"))
    with pytest.raises(StoreError):
        ExpertStore.open(target)
    prepare_store(random_source, target, OPTIONS, silent)
    assert contents(target) == finished


def test_disk_full_half_way_is_one_error_and_resumes(
    random_source: RandomSource, tmp_path: Path, finished: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = sum(map(len, finished.values())) // 2
    write = os.write

    def write_while_room(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        room -= len(data)
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "write", write_while_room)
        with pytest.raises(StoreError, match=r"disk is full while writing .*layer-.*do the same again"):
            prepare_store(random_source, tmp_path / "store", OPTIONS, silent)
    kept = [path for path in contents(tmp_path / "store") if "layer" in path]
    assert 0 < len(kept) < SHAPE.layers * len(TIERS)
    assert not list((tmp_path / "store").rglob("*.partial"))
    prepare_store(random_source, tmp_path / "store", OPTIONS, silent)
    assert contents(tmp_path / "store") == finished


def test_a_disk_known_to_be_too_small_is_refused_first(
    random_source: RandomSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: type("usage", (), {"free": 1000})())
    with pytest.raises(StoreError, match=r"has 1000 bytes free, the store needs \d+ more"):
        prepare_store(random_source, tmp_path / "store", OPTIONS, silent)
    assert [path for path in contents(tmp_path / "store") if "layer" in path or "model" in path] == []


def test_damaged_layers_are_made_again(random_source: RandomSource, tmp_path: Path, finished: dict[str, bytes]) -> None:
    target = tmp_path / "finished"
    flip_byte(layer_path(target, 1, "int8"), -5)
    layer_path(target, 0, "bf16").unlink()
    flip_byte(target / "model.safetensors", -5)
    prepare_store(random_source, target, OPTIONS, silent)
    assert contents(target) == finished


def test_a_directory_with_other_things_is_left_alone(random_source: RandomSource, tmp_path: Path) -> None:
    target = tmp_path / "photos"
    target.mkdir()
    (target / "cat.jpg").write_text("x")
    with pytest.raises(OptionError, match=r"not empty \(it holds cat.jpg\)"):
        prepare_store(random_source, target, OPTIONS, silent)
    assert contents(target) == {"cat.jpg": b"x"}
    with pytest.raises(OptionError, match="not a directory"):
        prepare_store(random_source, target / "cat.jpg", OPTIONS, silent)


def test_a_store_of_another_checkpoint_is_left_alone(tmp_path: Path, finished: dict[str, bytes]) -> None:
    other = RandomSource.create(tmp_path / "other", seed=1)
    with pytest.raises(StoreError, match="store of another checkpoint"):
        prepare_store(other, tmp_path / "finished", OPTIONS, silent)
    assert contents(tmp_path / "finished") == finished


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (PrepareOptions(("int5",), 32), "unknown tier 'int5'"),
        (PrepareOptions(("int4", "int4"), 32), "twice"),
        (PrepareOptions((), 32), "no tier"),
        (PrepareOptions(("int4",), 32, "magic"), "unknown quantizer 'magic'"),
        (PrepareOptions(("int4",), 128), "group size 128 does not divide the hidden size 64 .*--group-size 32"),
        (PrepareOptions(("int4",), 7), "unknown group size 7"),
    ],
)
def test_unfit_options_touch_nothing(
    random_source: RandomSource, tmp_path: Path, options: PrepareOptions, words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        prepare_store(random_source, tmp_path / "store", options, silent)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(("option", "value"), [("group_size", 64), ("quantizer", "rtn")])
def test_other_options_than_the_store_was_made_with(
    random_source: RandomSource, tmp_path: Path, finished: dict[str, bytes], option: str, value: object
) -> None:
    options = PrepareOptions(**{**vars(OPTIONS), "tiers": ("bf16",), option: value})
    with pytest.raises(OptionError, match=f"was prepared with --{option.replace('_', '-')}"):
        prepare_store(random_source, tmp_path / "finished", options, silent)
    assert contents(tmp_path / "finished") == finished


def test_nan_weights_stop_the_layer(random_source: RandomSource, tmp_path: Path) -> None:
    entry = random_source.checkpoint.tensors["1.2.up"]
    with entry.file.open("r+b") as file:
        file.seek(entry.start + 10)
        file.write(b"\xc0\x7f")  # a bfloat16 NaN
    with pytest.raises(CheckpointError, match=r"tensor 1.2.up in .* holds NaN"):
        prepare_store(random_source, tmp_path / "store", OPTIONS, silent)
    assert not layer_path(tmp_path / "store", 1, "int2").exists()
    assert layer_path(tmp_path / "store", 0, "int2").exists()


def hold_lock(target: Path, ready: object, done: object) -> None:
    with files.lock_directory(target):
        ready.set()  # type: ignore[attr-defined]
        done.wait()  # type: ignore[attr-defined]


def test_two_processes_do_not_prepare_one_directory(random_source: RandomSource, tmp_path: Path) -> None:
    target = tmp_path / "store"
    target.mkdir()
    ready, done = SPAWN.Event(), SPAWN.Event()
    child = SPAWN.Process(target=hold_lock, args=(target, ready, done))
    child.start()
    assert ready.wait(60)
    with pytest.raises(StoreError, match="another process is preparing"):
        prepare_store(random_source, target, OPTIONS, silent)
    said: list[str] = []

    def progress(what: str, *_: int) -> None:
        said.append(what)
        done.set()

    prepare_store(random_source, target, OPTIONS, progress, wait_for_lock=True)
    child.join()
    assert said[0].startswith("waiting")
    assert ExpertStore.open(target)


def test_progress_ends_at_the_total(random_source: RandomSource, tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    prepare_store(random_source, tmp_path / "s", OPTIONS, lambda what, done, total: seen.update({what: (done, total)}))
    assert seen == {"dense weights": (12000, 12000), "experts": (12, 12)}
