"""The 8-row interleaved order of codes, bit-exact in both directions (torch, the reference)."""

from __future__ import annotations

import torch

from dynaexq.formats.base import ExpertFormat
from dynaexq.formats.layout import ROWS
from dynaexq.formats.quantizers import Codes

LANE_BYTES = 4


def pack_matrix(
    fmt: ExpertFormat, codes: torch.Tensor, scale: torch.Tensor | None, offset: torch.Tensor | None
) -> torch.Tensor:
    """Pack one quantised matrix.

    Args:
        codes: uint8 [rows, columns] (int8 bit patterns when symmetric).
        scale, offset: float16 [rows, groups]; offset is None when symmetric, both are where the format is nested.

    Returns:
        uint8 [matrix_bytes], see layout.py.
    """
    rows, columns = codes.shape
    tiles, groups = rows // ROWS, columns // fmt.group_size
    parts = [_pack_codes(codes >> below, bits, fmt.group_size) for below, bits in _code_parts(fmt)]
    parts += [_meta_bytes(values, tiles, groups) for values in (scale, offset) if values is not None]
    return torch.cat(parts, -1).reshape(-1)


def unpack_matrix(fmt: ExpertFormat, packed: torch.Tensor, rows: int, columns: int) -> Codes:
    """Inverse of `pack_matrix`: uint8 [matrix_bytes] -> codes, scale, offset."""
    records = packed.reshape(rows // ROWS, columns // fmt.group_size, -1)
    codes = unpack_codes(fmt, records)
    position = fmt.group_size * fmt.bits
    scale = _meta_values(records[..., position : position + 2 * ROWS])
    return Codes(codes, scale, None if fmt.symmetric else _meta_values(records[..., position + 2 * ROWS :]))


def unpack_codes(fmt: ExpertFormat, records: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, columns] of packed records uint8 [tiles, groups, bytes], whatever comes after them there."""
    tiles, groups, _ = records.shape
    codes = torch.zeros((tiles * ROWS, groups * fmt.group_size), dtype=torch.uint8)
    position = 0
    for below, bits in _code_parts(fmt):
        end = position + fmt.group_size * bits
        codes |= _unpack_codes(records[..., position:end], bits, fmt.group_size) << below
        position = end
    return codes


def _code_parts(fmt: ExpertFormat) -> list[tuple[int, int]]:
    """(bits below, bits) of the parts that a code is stored in: 3 bits do not divide a byte, 2 and 1 do."""
    return [(0, 2), (2, 1)] if fmt.bits == 3 else [(0, fmt.bits)]


def _pack_codes(codes: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The lowest `bits` of codes [rows, columns] -> uint8 [tiles, groups, bytes]."""
    rows, columns = codes.shape
    planes = 8 // bits
    tiles, groups, vectors = rows // ROWS, columns // group, group // (LANE_BYTES * planes)
    # one 32-byte vector = 8 rows x 4 bytes; bit-plane p of byte b holds input 4 * p + b of the vector
    lanes = (codes & (255 >> 8 - bits)).reshape(tiles, ROWS, groups, vectors, planes, LANE_BYTES)
    shifts = torch.arange(planes, dtype=torch.uint8) * bits
    return (lanes.permute(0, 2, 3, 1, 5, 4) << shifts).sum(-1, dtype=torch.uint8).reshape(tiles, groups, -1)


def _unpack_codes(packed: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Inverse of `_pack_codes`: codes uint8 [rows, columns]."""
    tiles, groups, _ = packed.shape
    planes = 8 // bits
    vectors = group // (LANE_BYTES * planes)
    lanes = packed.reshape(tiles, groups, vectors, ROWS, LANE_BYTES).permute(0, 3, 1, 2, 4)
    codes = torch.empty((tiles, ROWS, groups, vectors, planes, LANE_BYTES), dtype=torch.uint8)
    for plane in range(planes):
        codes[..., plane, :] = (lanes >> plane * bits) & (255 >> 8 - bits)
    return codes.view(tiles * ROWS, groups * group)


def pack_bf16(matrix: torch.Tensor) -> torch.Tensor:
    """bfloat16 [rows, columns] -> uint8, tiles of 8 rows stored column by column."""
    rows, columns = matrix.shape
    lanes = matrix.reshape(rows // ROWS, ROWS, columns).transpose(1, 2).contiguous()
    return lanes.view(torch.uint8).reshape(-1)


def unpack_bf16(packed: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Inverse of `pack_bf16`."""
    lanes = packed.view(torch.bfloat16).reshape(rows // ROWS, columns, ROWS)
    return lanes.transpose(1, 2).reshape(rows, columns)


def _meta_bytes(values: torch.Tensor, tiles: int, groups: int) -> torch.Tensor:
    by_tile = values.reshape(tiles, ROWS, groups).transpose(1, 2).contiguous()
    return by_tile.view(torch.uint8).reshape(tiles, groups, -1)


def _meta_values(raw: torch.Tensor) -> torch.Tensor:
    by_tile = raw.contiguous().view(torch.float16)  # [tiles, groups, 8]
    tiles, groups, _ = by_tile.shape
    return by_tile.transpose(1, 2).reshape(tiles * ROWS, groups)
