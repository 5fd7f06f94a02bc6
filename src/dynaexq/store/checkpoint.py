"""A Hugging Face checkpoint directory, checked whole before anything is made of it."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dynaexq.core import CheckpointError, StoreError
from dynaexq.native import read_extent
from dynaexq.store.files import read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
SAMPLES = 64
"""Blocks of 4 KiB per shard that the fingerprint looks at, besides every header."""


class TensorEntry(NamedTuple):
    """Where one tensor lies: `nbytes` from absolute position `start` of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class Checkpoint:
    """Tensors of a directory of safetensors shards, read by position, never mapped into memory."""

    def __init__(self, root: Path, config: dict[str, Any], tensors: dict[str, TensorEntry]) -> None:
        self.root = root
        self.config = config
        self.tensors = tensors
        self._descriptors: dict[Path, int] = {}

    @classmethod
    def open(cls, root: Path) -> Checkpoint:
        """Check `root` and open it.

        Raises:
            CheckpointError: config or shards are missing, cut short, stale or contradict the index.
        """
        if not root.is_dir():
            raise CheckpointError(f"{root} is not a directory; give a model directory or a hub id such as org/name")
        config = read_json(root / "config.json")
        quantization = config.get("quantization_config")
        if quantization:
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
            if method == "dynaexq":
                raise StoreError(
                    f"{root} is a store whose dynaexq.json is missing; prepare it again into a new directory"
                )
            raise CheckpointError(
                f"{root} is already quantised ({method}); give the checkpoint in bfloat16, float16 or float32"
            )
        return cls(root, config, _collect_tensors(root))

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """Read one tensor, or its slice `[index]` along the first dimension.

        Raises:
            CheckpointError: unreadable, not floating point, or with NaN or infinity in it.
        """
        entry = self.tensors[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor {name} in {entry.file} has type {entry.dtype}; known are {', '.join(DTYPES)}"
            )
        shape, start, nbytes = entry.shape, entry.start, entry.nbytes
        if index is not None:
            if not shape or index >= shape[0]:
                raise CheckpointError(f"tensor {name} in {entry.file} has shape {list(shape)}, so no slice {index}")
            nbytes //= shape[0]
            shape, start = shape[1:], start + index * nbytes
        tensor = torch.from_numpy(self.read_bytes(entry.file, start, nbytes)).view(DTYPES[entry.dtype]).reshape(shape)
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"tensor {name} in {entry.file} holds NaN or infinite weights")
        return tensor

    def read_bytes(self, file: Path, start: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Raw bytes of a shard as uint8 [nbytes]. Raises CheckpointError."""
        try:
            if file not in self._descriptors:
                self._descriptors[file] = os.open(file, os.O_RDONLY)
            data = np.empty(nbytes, np.uint8)
            done, _ = read_extent(self._descriptors[file], start, data)
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
        if done != nbytes:
            raise CheckpointError(f"{file} is cut short: {nbytes} bytes wanted at {start}, {done} there")
        return data

    def fingerprint(self) -> str:
        """Identity of config, headers, sizes and a sample of the data of every shard (32 hex digits)."""
        digest = hashlib.blake2b(json.dumps(self.config, sort_keys=True).encode(), digest_size=16)
        for file in sorted({entry.file for entry in self.tensors.values()}):
            _, data_start, size = read_header(file, CheckpointError)
            digest.update(f"{file.name}:{size}:".encode())
            digest.update(self.read_bytes(file, 0, data_start).tobytes())
            for sample in range(SAMPLES):
                start = data_start + (size - data_start) * sample // SAMPLES
                digest.update(self.read_bytes(file, start, min(4096, size - start)).tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        """Close the shards."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint. Raises CheckpointError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _collect_tensors(root: Path) -> dict[str, TensorEntry]:
    if (root / INDEX_NAME).is_file():
        return _collect_indexed(root)
    if (root / SINGLE_NAME).is_file():
        return read_shard(root / SINGLE_NAME)
    pickled = sorted(path.name for path in root.glob("*.bin"))
    if pickled:
        raise CheckpointError(f"{root} holds {pickled[0]} (pickle, never read); convert it to safetensors first")
    raise CheckpointError(f"{root} holds neither {INDEX_NAME} nor {SINGLE_NAME}")


def _collect_indexed(root: Path) -> dict[str, TensorEntry]:
    index = read_json(root / INDEX_NAME)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{root / INDEX_NAME} has no weight_map")
    for name in sorted(set(weight_map.values()), key=str):
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{root / INDEX_NAME} names {name!r}, which is not a file of this directory")
    shards = {name: read_shard(root / name) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise CheckpointError(f"{root / INDEX_NAME} puts {tensor} into {name}, which does not hold it")
    for name, shard in shards.items():
        for tensor in shard:
            if weight_map.get(tensor) != name:
                raise CheckpointError(
                    f"{root / name} is stale: it holds {tensor}, which {INDEX_NAME} does not place there; "
                    "fetch the shards and the index of one and the same version"
                )
    return {tensor: entry for shard in shards.values() for tensor, entry in shard.items()}


def read_shard(path: Path) -> dict[str, TensorEntry]:
    """Tensors of one safetensors file by name. Raises CheckpointError when missing, cut short or damaged."""
    if not path.exists():
        raise CheckpointError(f"shard {path} is missing")
    header, data_start, size = read_header(path, CheckpointError)
    header.pop("__metadata__", None)
    tensors = {}
    spans = []
    for name, entry in header.items():
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(extent) for extent in entry["shape"])
            begin, stop = (int(position) for position in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged: bad header entry for {name}") from error
        width = DTYPES[dtype].itemsize if dtype in DTYPES else 0
        if (
            begin < 0
            or stop < begin
            or min(shape, default=0) < 0
            or (width and math.prod(shape) * width != stop - begin)
        ):
            raise CheckpointError(f"{path} is damaged: shape and bytes of {name} disagree")
        tensors[name] = TensorEntry(path, dtype, shape, data_start + begin, stop - begin)
        spans.append((begin, stop, name))
    end = 0
    for begin, stop, name in sorted(spans):
        if begin != end:
            raise CheckpointError(f"{path} is damaged: the bytes of {name} overlap others or leave a gap")
        end = stop
    if data_start + end != size:
        raise CheckpointError(f"shard {path} is cut short or damaged: {data_start + end} bytes expected, {size} there")
    return tensors
