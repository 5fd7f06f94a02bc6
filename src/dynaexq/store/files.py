"""Files that are either whole or absent, and safetensors headers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dynaexq.core import DynaExqError, StoreError
from dynaexq.native import crc32c

PARTIAL_SUFFIX = ".partial"
LOCK_NAME = ".dynaexq.lock"
MAX_HEADER_BYTES = 100 << 20
"""The safetensors format's own bound on a header."""


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[int]:
    """Yield a descriptor of a partial file; on success sync it and rename it to `path`.

    Raises:
        StoreError: the disk is full or the file cannot be written. The partial file is removed.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        partial.rename(path)
        sync_directory(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise write_error(path, error) from error
        raise


def write_error(path: Path, error: OSError) -> StoreError:
    """The error for a failed write to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"the disk is full while writing {path}; make space and do the same again: what is finished is kept"
        )
    return StoreError(f"cannot write {path}: {error.strerror or error}")


def sync_directory(path: Path) -> None:
    """Make renames in `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data` at the descriptor's position."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]


@contextlib.contextmanager
def lock_directory(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the directory's writer lock; it falls with the process, however that ends.

    Where another process holds it: wait after calling `on_wait`, or without one

    Raises:
        StoreError: another process is preparing the directory.
    """
    try:
        descriptor = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise write_error(path / LOCK_NAME, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is None:
                raise StoreError(f"another process is preparing {path}; wait for it to end") from None
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def file_checksum(path: Path) -> int:
    """CRC-32C of a small file. Raises StoreError."""
    try:
        return crc32c(np.frombuffer(path.read_bytes(), np.uint8))
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def read_header(path: Path, error: type[DynaExqError]) -> tuple[dict[str, Any], int, int]:
    """Parse a safetensors header.

    Returns:
        The header, the file position where data starts, and the file's size.

    Raises:
        error: the file is unreadable, cut short, or its header is not one.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise error(f"{path} is cut short: {size} bytes cannot hold a safetensors header")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise error(f"{path} is damaged or cut short: its header claims {length} bytes, the file has {size}")
            header = json.loads(file.read(length), object_pairs_hook=_no_duplicates)
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from problem
    except (ValueError, RecursionError) as problem:
        raise error(f"{path} is damaged: its safetensors header is not valid JSON ({problem})") from problem
    if not isinstance(header, dict):
        raise error(f"{path} is damaged: its safetensors header is not an object")
    return header, 8 + length, size


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} appears twice")
    return dict(pairs)


def header_bytes(header: dict[str, Any], total: int = 0, unit: int = 8) -> bytes:
    """Serialise a safetensors header, padded with spaces to `total` bytes (or to a multiple of `unit`)."""
    text = json.dumps(header, separators=(",", ":")).encode()
    total = total or -(-(8 + len(text)) // unit) * unit
    assert 8 + len(text) <= total, "the header outgrew its reserve"
    return struct.pack("<Q", total - 8) + text.ljust(total - 8)
