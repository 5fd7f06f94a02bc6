"""The 8-row interleaved order of codes, bit-exact in both directions (torch, the reference)."""

from __future__ import annotations

import torch

from dynaexq.formats.base import ExpertFormat
from dynaexq.formats.layout import ROWS

LANE_BYTES = 4


def pack_matrix(
    fmt: ExpertFormat, codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None
) -> torch.Tensor:
    """Pack one quantised matrix.

    Args:
        codes: uint8 [rows, columns] (int8 bit patterns when symmetric).
        scale, offset: float16 [rows, groups]; offset is None when symmetric.

    Returns:
        uint8 [matrix_bytes], see layout.py.
    """
    rows, columns = codes.shape
    group, planes = fmt.group_size, 8 // fmt.bits
    tiles, groups = rows // ROWS, columns // group
    vectors = group // (LANE_BYTES * planes)
    # one 32-byte vector = 8 rows x 4 bytes; bit-plane p of byte b holds input 4 * p + b of the vector
    lanes = codes.reshape(tiles, ROWS, groups, vectors, planes, LANE_BYTES).permute(0, 2, 3, 1, 5, 4)
    shifts = torch.arange(planes, dtype=torch.uint8) * fmt.bits
    packed = (lanes << shifts).sum(-1, dtype=torch.uint8).reshape(tiles, groups, -1)
    parts = [packed, _meta_bytes(scale, tiles, groups)]
    if offset is not None:
        parts.append(_meta_bytes(offset, tiles, groups))
    return torch.cat(parts, -1).reshape(-1)


def unpack_matrix(
    fmt: ExpertFormat, packed: torch.Tensor, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Inverse of `pack_matrix`: uint8 [matrix_bytes] -> (codes, scale, offset)."""
    group, planes = fmt.group_size, 8 // fmt.bits
    tiles, groups = rows // ROWS, columns // group
    vectors = group // (LANE_BYTES * planes)
    records = packed.reshape(tiles, groups, -1)
    code_bytes = group * fmt.bits
    lanes = records[..., :code_bytes].reshape(tiles, groups, vectors, ROWS, LANE_BYTES).permute(0, 3, 1, 2, 4)
    codes = torch.empty((tiles, ROWS, groups, vectors, planes, LANE_BYTES), dtype=torch.uint8)
    for plane in range(planes):
        codes[..., plane, :] = (lanes >> plane * fmt.bits) & (255 >> 8 - fmt.bits)
    codes = codes.view(rows, columns)
    scale = _meta_values(records[..., code_bytes : code_bytes + 16], rows, groups)
    offset = None if fmt.symmetric else _meta_values(records[..., code_bytes + 16 :], rows, groups)
    return codes, scale, offset


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
    return by_tile.view(torch.uint8).reshape(tiles, groups, 2 * ROWS)


def _meta_values(raw: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    by_tile = raw.contiguous().view(torch.float16)  # [tiles, groups, 8]
    return by_tile.transpose(1, 2).reshape(rows, groups)
