"""Small helpers over files."""

from __future__ import annotations

from pathlib import Path


def silent(*_: object) -> None:
    """A progress callback that says nothing."""


def contents(root: Path) -> dict[str, bytes]:
    """Every file below `root` by relative name."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def directory_bytes(root: Path) -> int:
    """Bytes of all files below `root`."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def flip_byte(path: Path, position: int) -> None:
    """Flip one bit of the byte at `position` (negative: from the end)."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))
