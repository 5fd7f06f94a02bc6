"""The dense part of a checkpoint: every tensor that is no expert, copied byte for byte."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dynaexq.core import CheckpointError, StoreError
from dynaexq.native import crc32c, read_extent
from dynaexq.store.checkpoint import DTYPES, Checkpoint
from dynaexq.store.files import header_bytes, replace_atomically, write_all
from dynaexq.store.manifest import DENSE_NAME, DenseInfo

CHUNK_BYTES = 4 << 20

Chunk = np.ndarray[Any, np.dtype[np.uint8]]


class Tensor(Protocol):
    """What the header of the dense file says about a tensor: its safetensors type, its shape, its size."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


def write_dense(checkpoint: Checkpoint, names: Iterable[str], root: Path, advance: Callable[[int], None]) -> DenseInfo:
    """Write `root`/model.safetensors with the tensors `names`, a few MiB in memory at a time.

    Raises:
        CheckpointError: a tensor is unreadable or not finite.
        StoreError: the disk is full or the file cannot be written.
    """

    def read(name: str) -> Iterator[Chunk]:
        entry = checkpoint.tensors[name]
        for start in range(0, entry.nbytes, CHUNK_BYTES):
            nbytes = min(CHUNK_BYTES, entry.nbytes - start)
            chunk = checkpoint.read_bytes(entry.file, entry.start + start, nbytes)
            _check_finite(chunk, name, entry.dtype, entry.file)
            yield chunk

    return write_tensors({name: checkpoint.tensors[name] for name in names}, read, root, advance)


def write_tensors(
    tensors: Mapping[str, Tensor], read: Callable[[str], Iterable[Chunk]], root: Path, advance: Callable[[int], None]
) -> DenseInfo:
    """Write `root`/model.safetensors with `tensors`; `read` gives the bytes of one by name, in chunks (uint8).

    Raises:
        StoreError: the disk is full or the file cannot be written.
    """
    ordered = sorted(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name in ordered:
        entry = tensors[name]
        header[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.nbytes],
        }
        position += entry.nbytes
    head = header_bytes(header)
    checksum = crc32c(np.frombuffer(head, np.uint8))
    with replace_atomically(root / DENSE_NAME) as descriptor:
        write_all(descriptor, head)
        written = 0
        for name in ordered:
            for chunk in read(name):
                write_all(descriptor, chunk.data)
                checksum = crc32c(chunk, checksum)
                written += chunk.nbytes
                advance(chunk.nbytes)
        assert written == position
    return DenseInfo(nbytes=len(head) + position, crc32c=checksum)


def verify_dense(root: Path, info: DenseInfo) -> None:
    """Check size and checksum of the dense file. Raises StoreError."""
    path = root / DENSE_NAME
    buffer = np.empty(CHUNK_BYTES, np.uint8)
    checksum = position = 0
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size != info.nbytes:
                found = os.fstat(descriptor).st_size
                raise StoreError(f"{path} is cut short or damaged: {info.nbytes} bytes expected, {found} there")
            while position < info.nbytes:
                chunk = buffer[: min(CHUNK_BYTES, info.nbytes - position)]
                done, _ = read_extent(descriptor, position, chunk)
                checksum = crc32c(chunk[:done], checksum)
                position += chunk.nbytes
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    if checksum != info.crc32c:
        raise StoreError(
            f"{path} is damaged: its checksum is wrong; run `dynaexq prepare` (or `synth`) again to restore it"
        )


def _check_finite(chunk: Chunk, name: str, dtype: str, file: Path) -> None:
    if dtype in DTYPES and not bool(torch.isfinite(torch.from_numpy(chunk).view(DTYPES[dtype])).all()):
        raise CheckpointError(f"tensor {name} in {file} holds NaN or infinite weights")
