"""Bad checkpoints: one clear error each, before anything is made."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dynaexq.core import CheckpointError
from dynaexq.store import Checkpoint
from dynaexq.store.checkpoint import INDEX_NAME


@pytest.fixture
def broken(checkpoint_directory: Path, tmp_path: Path) -> Path:
    """A copy of the three-shard checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint_directory, tmp_path / "broken"))


def shard(root: Path) -> Path:
    (path,) = root.glob("model-00002-of-*.safetensors")
    return Path(path)


def edit_index(root: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((root / INDEX_NAME).read_text())
    change(index["weight_map"])
    (root / INDEX_NAME).write_text(json.dumps(index))


def refuse(root: Path, *words: str) -> None:
    before = sorted(root.iterdir())
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(root)
    assert all(word in str(error.value) for word in words), error.value
    assert sorted(root.iterdir()) == before


def test_tensors_equal_what_safetensors_reads(checkpoint_directory: Path) -> None:
    checkpoint = Checkpoint.open(checkpoint_directory)
    count = 0
    for file in checkpoint_directory.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(checkpoint.read(name), tensor)
            assert torch.equal(checkpoint.read(name, 1), tensor[1])
            count += 1
    assert count == len(checkpoint.tensors) > 0


def test_missing_shard(broken: Path) -> None:
    path = shard(broken)
    path.unlink()
    refuse(broken, str(path), "is missing")


def test_shard_cut_short_by_a_kibibyte(broken: Path) -> None:
    data = shard(broken).read_bytes()
    shard(broken).write_bytes(data[:-1024])
    refuse(broken, str(shard(broken)), "cut short", str(len(data)))


@pytest.mark.parametrize("size", [0, 5, 100])
def test_shard_cut_inside_its_header(broken: Path, size: int) -> None:
    shard(broken).write_bytes(shard(broken).read_bytes()[:size])
    refuse(broken, str(shard(broken)), "cut short")


def test_stale_shard_of_another_save(broken: Path) -> None:
    tensors = load_file(shard(broken))
    tensors["left.over.weight"] = torch.zeros(2)
    save_file(tensors, shard(broken))
    refuse(broken, str(shard(broken)), "stale", "left.over.weight")


def test_index_naming_a_missing_tensor(broken: Path) -> None:
    edit_index(broken, lambda weights: weights.update({"ghost.weight": shard(broken).name}))
    refuse(broken, "ghost.weight", shard(broken).name)


def test_index_that_forgets_a_tensor(broken: Path) -> None:
    edit_index(broken, lambda weights: weights.pop("model.norm.weight"))
    refuse(broken, "stale", "model.norm.weight")


def test_index_that_leaves_the_directory(broken: Path) -> None:
    edit_index(broken, lambda weights: weights.update({"model.norm.weight": "../other.safetensors"}))
    refuse(broken, "../other.safetensors", "not a file of this directory")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_index_that_is_none(broken: Path, text: str) -> None:
    (broken / INDEX_NAME).write_text(text)
    refuse(broken, INDEX_NAME)


def test_header_with_impossible_offsets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    refuse(tmp_path, "shape and bytes of w disagree")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ('"w":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}', "shape and bytes of w disagree"),
        (
            '"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}',
            "twice",
        ),
        (
            '"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}',
            "overlap",
        ),
        ('"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}', "leave a gap"),
        ('"w":{"dtype":"F32"}', "bad header entry for w"),
    ],
)
def test_headers_that_would_give_wrong_weights(tmp_path: Path, entries: str, words: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    header = f"{{{entries}}}".encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    refuse(tmp_path, words)


def test_json_too_deep_to_parse(broken: Path) -> None:
    (broken / "config.json").write_text("[" * 100_000)
    refuse(broken, "config.json", "not valid JSON")


def test_config_missing_or_damaged(broken: Path) -> None:
    (broken / "config.json").write_text("{")
    refuse(broken, "config.json", "not valid JSON")
    (broken / "config.json").unlink()
    refuse(broken, "config.json is missing")


def test_already_quantised(broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    refuse(broken, "already quantised (fp8)")


def test_pickles_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refuse(tmp_path, "pickle", "safetensors")


def test_empty_directory_and_no_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refuse(tmp_path, "neither")
    with pytest.raises(CheckpointError, match="not a directory"):
        Checkpoint.open(tmp_path / "nowhere")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tmp_path: Path, value: float) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.tensor([1.0, value])}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"tensor w in .*model.safetensors holds NaN or infinite"):
        checkpoint.read("w")


def test_integer_tensors_are_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="type I8"):
        Checkpoint.open(tmp_path).read("w")


def test_unreadable_file(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read anything, so the refusal comes from the call itself."""

    def refuse_open(self: Path, *_: object, **__: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse_open)
    refuse(broken, "cannot read", "Permission denied")


def test_fingerprint_follows_the_contents(checkpoint_directory: Path, broken: Path) -> None:
    first = Checkpoint.open(checkpoint_directory).fingerprint()
    assert Checkpoint.open(broken).fingerprint() == first
    data = bytearray(shard(broken).read_bytes())
    data[-1] ^= 1
    changed = bytes(data[:-4096]) + bytes(b ^ 1 for b in data[-4096:])
    shard(broken).write_bytes(changed)
    assert Checkpoint.open(broken).fingerprint() != first
