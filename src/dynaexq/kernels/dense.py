"""Dense linear layers over packed weights, through the same kernels as the experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from dynaexq.core import OptionError, round_up
from dynaexq.device import CpuDevice
from dynaexq.formats import ExpertFormat, tier_format
from dynaexq.formats.codec import decode_matrix, encode_matrix
from dynaexq.formats.layout import ROWS, SECTION_ALIGNMENT, matrix_bytes
from dynaexq.formats.quantizers import quantize_matrix
from dynaexq.kernels.threads import thread_count
from dynaexq.native import PackedLinear, instruction_sets

DENSE = ("full", "bf16", "int8", "int4")
"""What dense weights are kept in: `full` leaves them to torch, in the model's dtype."""

GROUPS = (64, 32)
QUANTIZERS = {"bf16": "rtn", "int8": "rtn", "int4": "als-gain"}
"""For int8, least squares is no better than rounding to nearest, and five times as slow."""

SLAB_BYTES = 64 << 20
ROWS_AT_ONCE = 4096
"""Packed at a time: the float32 form of a whole output head would be the largest tensor of a run."""


def check_dense(dense: str) -> None:
    """Raise OptionError for an unknown form of dense weights."""
    if dense not in DENSE:
        raise OptionError(f"unknown dense '{dense}'; known are {', '.join(DENSE)}")


def dense_format(dense: str, columns: int) -> ExpertFormat:
    """The format of a matrix with `columns` inputs: the one asked for, or bf16 where no group divides it."""
    fitting = [group for group in GROUPS if columns % group == 0]
    return tier_format(dense, fitting[0]) if dense != "bf16" and fitting else tier_format("bf16")


def packed_bytes(dense: str, rows: int, columns: int) -> int:
    """Bytes of a packed matrix [rows, columns]."""
    return matrix_bytes(dense_format(dense, columns), round_up(rows, ROWS), columns)


def embedding_format(dense: str, columns: int) -> ExpertFormat:
    """The format of an embedding: int8 where matrices are integers (a row is read, not multiplied), else bf16."""
    return dense_format("bf16" if dense == "bf16" else "int8", columns)


def embedding_bytes(dense: str, rows: int, columns: int) -> int:
    """Bytes of a packed embedding [rows, columns]."""
    fmt = embedding_format(dense, columns)
    return rows * columns * fmt.bits // 8 + (rows * columns // fmt.group_size * 2 if fmt.quantized else 0)


class _Slabs:
    """Memory for packed matrices, many in one mapping: only mappings of several MiB get huge pages, which are a fifth
    faster to stream. A slab is given back when the last matrix in it is."""

    def __init__(self) -> None:
        self._slab: torch.Tensor = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on a 64-byte boundary."""
        size = round_up(nbytes, SECTION_ALIGNMENT)
        if size > len(self._slab):
            whole = max(size, SLAB_BYTES)  # what is not touched takes no memory
            self._slab = CpuDevice().allocate(whole).view(0, whole)
        taken, self._slab = self._slab[:nbytes], self._slab[size:]
        return taken


_slabs = _Slabs()


class PackedMatrix:
    """A matrix [rows, columns] in packed form, and the product with it."""

    def __init__(self, weight: torch.Tensor, dense: str, activations: str) -> None:
        """Pack `weight` (any float dtype); `activations` as for experts (see kernels/native.py)."""
        self.rows, self.columns = weight.shape
        self.format = dense_format(dense, self.columns)
        nbytes = packed_bytes(dense, self.rows, self.columns)
        self.packed = _slabs.take(nbytes)
        done = 0
        for part in torch.split(weight.detach(), ROWS_AT_ONCE):
            padded = F.pad(part.to(torch.float32), (0, 0, 0, -len(part) % ROWS))
            packed = encode_matrix(padded, self.format, QUANTIZERS[self.format.name])
            self.packed[done : done + len(packed)] = packed
            done += len(packed)
        self.native = PackedLinear(
            weights=self.packed.data_ptr(),
            nbytes=self.packed.nbytes,
            bits=self.format.bits,
            group=self.format.group_size,
            rows=self.rows,
            columns=self.columns,
            exact=activations == "fp32",
            instructions=instruction_sets()[0],
        )

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., columns] (float32 or bfloat16) times the transpose, plus bias (float32 [rows]): [..., rows]."""
        assert x.shape[-1] == self.columns, (x.shape, self.columns)
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.rows), dtype=x.dtype)
        self.native.forward(
            x.dtype == torch.bfloat16,
            x.data_ptr(),
            x.numel() // self.columns,
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            thread_count(),
        )
        return out

    def restore(self) -> torch.Tensor:
        """The matrix that is computed with, float32 [rows, columns]."""
        return decode_matrix(self.packed, self.format, round_up(self.rows, ROWS), self.columns)[: self.rows]


class PackedRows:
    """An embedding [rows, columns] that rows are taken from: bf16, or int8 codes with float16 scales."""

    def __init__(self, weight: torch.Tensor, dense: str) -> None:
        """Pack `weight` (any float dtype)."""
        self.format = embedding_format(dense, weight.shape[1])
        self._scale: torch.Tensor | None = None
        if not self.format.quantized:
            self._values = weight.detach().to(torch.bfloat16)
            return
        rows, columns = weight.shape
        self._values = torch.empty((rows, columns), dtype=torch.int8)
        self._scale = torch.empty((rows, columns // self.format.group_size), dtype=torch.float16)
        for start in range(0, rows, ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            codes = quantize_matrix(weight[part].detach().to(torch.float32), self.format, "rtn")
            self._values[part], self._scale[part] = codes.codes.view(torch.int8), codes.scale

    def parts(self) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """Values [rows, columns], scales [rows, groups] of int8 values, and the group size (0: bf16)."""
        return self._values, self._scale, self.format.group_size if self.format.quantized else 0

    def take(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of `ids` [...] as [..., columns]."""
        taken = F.embedding(ids, self._values)
        if self._scale is None:
            return taken.to(dtype)
        scale = F.embedding(ids, self._scale).to(torch.float32).unsqueeze(-1)
        groups = taken.to(torch.float32).reshape(*scale.shape[:-1], self.format.group_size)
        return (groups * scale).flatten(-2).to(dtype)
