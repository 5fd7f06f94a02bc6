"""Where everything lies inside one expert version. Sizes need no data.

A version is one block: the sections gate, up and down, each starting on a 64-byte boundary, padded to
4 KiB. A section holds a matrix [rows, columns] as tiles of 8 rows. A quantised tile is a run of groups
along the columns, each `8 * group * bits / 8` bytes of codes, then 8 float16 scales, then (unless
symmetric) 8 float16 offsets. docs/format.md shows the order of the codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynaexq.core import BLOCK_BYTES, ExpertShape, OptionError, round_up
from dynaexq.formats.base import ExpertFormat

LAYOUT_ID = "r8.1"
"""Name of this layout in a store's manifest; a change of any byte position changes it."""

ROWS = 8
SECTION_ALIGNMENT = 64


@dataclass(frozen=True)
class Section:
    """One packed matrix [rows, columns]: `nbytes` bytes from `offset` in the version's block."""

    offset: int
    nbytes: int
    rows: int
    columns: int


@dataclass(frozen=True)
class VersionLayout:
    """Byte positions of one expert version."""

    gate: Section
    up: Section
    down: Section

    @classmethod
    def of(cls, fmt: ExpertFormat, shape: ExpertShape) -> VersionLayout:
        """Layout of an expert of `shape` in format `fmt`.

        Raises:
            OptionError: the shape cannot be divided into groups or tiles.
        """
        check_divisible(fmt, shape)
        offset = 0
        sections = []
        sizes = (
            (shape.intermediate, shape.hidden),
            (shape.intermediate, shape.hidden),
            (shape.hidden, shape.intermediate),
        )
        for matrix, (rows, columns) in zip(fmt.matrices, sizes, strict=True):
            nbytes = matrix_bytes(matrix, rows, columns)
            sections.append(Section(offset, nbytes, rows, columns))
            offset = round_up(offset + nbytes, SECTION_ALIGNMENT)
        return cls(*sections)

    @property
    def sections(self) -> tuple[Section, Section, Section]:
        return self.gate, self.up, self.down

    @property
    def payload_bytes(self) -> int:
        """Bytes that carry weights, scales and offsets."""
        return sum(section.nbytes for section in self.sections)

    @property
    def extent_bytes(self) -> int:
        """Bytes the version takes on disk and in an arena, a multiple of 4 KiB."""
        return round_up(self.down.offset + self.down.nbytes, BLOCK_BYTES)


def matrix_bytes(fmt: ExpertFormat, rows: int, columns: int) -> int:
    """Packed size of a matrix [rows, columns] in bytes."""
    if not fmt.quantized:
        return rows * columns * 2
    return rows // ROWS * (columns // fmt.group_size) * (fmt.group_size * fmt.bits + fmt.meta_bytes)


def check_divisible(fmt: ExpertFormat, shape: ExpertShape) -> None:
    """Raise OptionError where `shape` does not split into 8-row tiles and whole groups."""
    for name, size in (("hidden size", shape.hidden), ("expert width", shape.intermediate)):
        if size % ROWS:
            raise OptionError(f"the {name} {size} is not a multiple of {ROWS}, which the layout needs")
        if fmt.quantized and size % fmt.group_size:
            fitting = [group for group in (32, 64, 128) if not (shape.hidden % group or shape.intermediate % group)]
            way_out = (
                f"use --group-size {' or '.join(map(str, fitting))}" if fitting else "only the bf16 tier can hold it"
            )
            raise OptionError(
                f"group size {fmt.group_size} does not divide the {name} {size} (tier {fmt.name}); {way_out}"
            )
