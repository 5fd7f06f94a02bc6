"""One file per (layer, tier): every expert's version as a 4 KiB-aligned extent.

The file is valid safetensors (tensors `expert.N`, uint8), its header padded so that data starts on a
4 KiB boundary. Checksums and errors stand in the header's metadata.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dynaexq.core import BLOCK_BYTES, StoreError, round_up
from dynaexq.formats.codec import Encoded
from dynaexq.native import crc32c, read_extent
from dynaexq.store.files import header_bytes, read_header, replace_atomically, write_all


class AddVersion(Protocol):
    """Takes a layer's next version, the checksum of the one it refines (None: it stands alone), and its error in
    outputs (None: not calibrated)."""

    def __call__(self, version: Encoded, base: int | None = None, output_error: float | None = None) -> None: ...


@dataclass(frozen=True)
class LayerIdentity:
    """What a layer file must say about itself to belong to a store."""

    fingerprint: str
    layout: str
    layer: str
    tier: str
    group_size: int
    quantizer: str

    def metadata(self) -> dict[str, str]:
        return {name: str(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class LayerFile:
    """An opened, header-checked layer file. Extent `i` lies at `start + i * extent_bytes`."""

    path: Path
    start: int
    extent_bytes: int
    checksums: list[int]
    errors: list[float]
    bases: list[int]
    """Checksums of the versions that these refine; empty where they stand alone."""
    output_errors: list[float]
    """Per selection, see store.sources.Calibration; empty where the store was not calibrated."""

    def position(self, expert: int) -> int:
        """File position of the extent of `expert` in bytes."""
        return self.start + expert * self.extent_bytes


def layer_path(root: Path, layer: int, tier: str) -> Path:
    """Path of the file with all versions of `tier` in MoE layer `layer`."""
    return root / "experts" / f"layer-{layer:04d}.{tier}.safetensors"


@contextlib.contextmanager
def write_layer(
    path: Path, identity: LayerIdentity, experts: int, extent_bytes: int, calibrated: bool = False
) -> Iterator[AddVersion]:
    """Yield a function that takes the layer's versions in order; the file appears only when all came.

    Args:
        calibrated: errors in outputs come with them.

    Raises:
        StoreError: the disk is full or the file cannot be written.
    """
    nothing, none = [0] * experts, [0.0] * experts
    sized = _header(identity, nothing, none, nothing, none if calibrated else [], extent_bytes)
    reserve = round_up(len(sized), BLOCK_BYTES)
    checksums: list[int] = []
    errors: list[float] = []
    bases: list[int] = []
    output_errors: list[float] = []
    with replace_atomically(path) as descriptor:
        os.lseek(descriptor, reserve, os.SEEK_SET)

        def add(version: Encoded, base: int | None = None, output_error: float | None = None) -> None:
            block = version.block.numpy()
            assert block.nbytes == extent_bytes
            write_all(descriptor, block.data)
            checksums.append(crc32c(block))
            errors.append(version.error)
            if base is not None:
                bases.append(base)
            if output_error is not None:
                output_errors.append(output_error)

        yield add
        assert len(checksums) == experts and len(bases) in (0, experts)
        assert len(output_errors) == (experts if calibrated else 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        write_all(descriptor, _header(identity, checksums, errors, bases, output_errors, extent_bytes, reserve))


def open_layer(path: Path, identity: LayerIdentity, experts: int, extent_bytes: int) -> LayerFile:
    """Read and check the header of a layer file.

    Raises:
        StoreError: missing, cut short, damaged, or made for something else.
    """
    if not path.exists():
        raise StoreError(
            f"the store is incomplete: {path} is missing; run `dynaexq prepare` (or `synth`) again to restore it"
        )
    header, start, size = read_header(path, StoreError)
    metadata = header.get("__metadata__")
    metadata = metadata if isinstance(metadata, dict) else {}
    for name, expected in identity.metadata().items():
        if metadata.get(name) != expected:
            raise StoreError(
                f"{path} is damaged or belongs to another store: its {name} is {metadata.get(name)!r}, not {expected!r}"
            )
    if size != start + experts * extent_bytes or start % BLOCK_BYTES:
        raise StoreError(
            f"{path} is cut short or damaged: {start + experts * extent_bytes} bytes expected, {size} there"
        )
    try:
        checksums = [int(word, 16) for word in metadata["crc32c"].split()]
        errors = [float(word) for word in metadata["error"].split()]
        bases = [int(word, 16) for word in metadata.get("base_crc32c", "").split()]
        output_errors = [float(word) for word in metadata.get("output_error", "").split()]
    except (KeyError, AttributeError, ValueError):
        checksums, errors, bases, output_errors = [], [], [], []
    if len(checksums) != experts or len(errors) != experts or len(bases) not in (0, experts):
        raise StoreError(f"{path} is damaged: its checksums are unreadable")
    if len(output_errors) not in (0, experts) or not all(math.isfinite(e) and e >= 0 for e in output_errors):
        raise StoreError(f"{path} is damaged: its errors in outputs are unreadable")
    return LayerFile(path, start, extent_bytes, checksums, errors, bases, output_errors)


def read_extent_of(file: LayerFile, expert: int) -> torch.Tensor:
    """The version of one expert, uint8 [extent_bytes]. Raises StoreError where it is not as it was written."""
    buffer = np.empty(file.extent_bytes, np.uint8)
    with _opened(file.path) as descriptor:
        if not _read(file, descriptor, expert, buffer):
            raise StoreError(f"{file.path} is damaged: the bytes of expert {expert} do not match their checksum")
    return torch.from_numpy(buffer)


def damaged_extents(file: LayerFile) -> list[int]:
    """Experts whose bytes do not match their checksum. Raises StoreError when unreadable."""
    buffer = np.empty(file.extent_bytes, np.uint8)
    with _opened(file.path) as descriptor:
        return [expert for expert in range(len(file.checksums)) if not _read(file, descriptor, expert, buffer)]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def _read(file: LayerFile, descriptor: int, expert: int, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    """Read one extent into `buffer`; whether it is as it was written."""
    done, found = read_extent(descriptor, file.position(expert), buffer)
    return done == file.extent_bytes and found == file.checksums[expert]


def _header(
    identity: LayerIdentity,
    checksums: list[int],
    errors: list[float],
    bases: list[int],
    output_errors: list[float],
    extent_bytes: int,
    total: int = 0,
) -> bytes:
    metadata = {
        **identity.metadata(),
        "crc32c": " ".join(f"{checksum:08x}" for checksum in checksums),
        "error": " ".join(f"{error:.6e}" for error in errors),
    }
    if bases:
        metadata["base_crc32c"] = " ".join(f"{checksum:08x}" for checksum in bases)
    if output_errors:
        metadata["output_error"] = " ".join(f"{error:.6e}" for error in output_errors)
    header: dict[str, Any] = {"__metadata__": metadata}
    for expert in range(len(checksums)):
        begin = expert * extent_bytes
        header[f"expert.{expert}"] = {
            "dtype": "U8",
            "shape": [extent_bytes],
            "data_offsets": [begin, begin + extent_bytes],
        }
    return header_bytes(header, total)
