"""Whole expert versions: plain weights -> block of bytes, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dynaexq.core import ExpertShape
from dynaexq.formats.base import ExpertFormat, ExpertWeights
from dynaexq.formats.interleave import pack_bf16, pack_matrix, unpack_bf16, unpack_matrix
from dynaexq.formats.layout import Section, VersionLayout
from dynaexq.formats.quantizers import Codes, dequantize, quantize_matrix


class Encoded(NamedTuple):
    """A finished version: uint8 [extent_bytes], and its relative weight error |W - W'| / |W| (Frobenius)."""

    block: torch.Tensor
    error: float


def encode(weights: ExpertWeights, fmt: ExpertFormat, shape: ExpertShape, quantizer: str) -> Encoded:
    """Quantise and pack one expert (any float dtype). `quantizer` does not matter for bf16.

    Raises:
        OptionError, FormatError: see VersionLayout.of and quantize_matrix.
    """
    layout = VersionLayout.of(fmt, shape)
    block = torch.zeros(layout.extent_bytes, dtype=torch.uint8)
    lost = total = 0.0
    for matrix, section in zip(weights, layout.sections, strict=True):
        exact = matrix.to(torch.float32)
        assert exact.shape == (section.rows, section.columns), (exact.shape, section)
        packed, restored = _encode_matrix(exact, fmt, quantizer)
        block[section.offset : section.offset + section.nbytes] = packed
        lost += float((exact - restored).square().sum())
        total += float(exact.square().sum())
    return Encoded(block, (lost / total) ** 0.5 if total else 0.0)


def decode(block: torch.Tensor, fmt: ExpertFormat, shape: ExpertShape) -> ExpertWeights:
    """Plain float32 weights of a version. `block` is uint8, at least the layout's payload long."""
    layout = VersionLayout.of(fmt, shape)
    return ExpertWeights(*(decode_section(block, fmt, section) for section in layout.sections))


def decode_section(block: torch.Tensor, fmt: ExpertFormat, section: Section) -> torch.Tensor:
    """One matrix float32 [rows, columns] of a version's block."""
    packed = block[section.offset : section.offset + section.nbytes]
    return decode_matrix(packed, fmt, section.rows, section.columns)


def encode_matrix(matrix: torch.Tensor, fmt: ExpertFormat, quantizer: str) -> torch.Tensor:
    """Packed form of a matrix float32 [rows, columns] by itself, uint8 [matrix_bytes]; rows are whole tiles."""
    return _encode_matrix(matrix, fmt, quantizer)[0]


def decode_matrix(packed: torch.Tensor, fmt: ExpertFormat, rows: int, columns: int) -> torch.Tensor:
    """Inverse of `encode_matrix` but for rounding, float32 [rows, columns]."""
    if not fmt.quantized:
        return unpack_bf16(packed, rows, columns).to(torch.float32)
    codes, scale, offset = unpack_matrix(fmt, packed, rows, columns)
    return _restore(Codes(codes, scale, offset), fmt, rows, columns)


def _encode_matrix(exact: torch.Tensor, fmt: ExpertFormat, quantizer: str) -> tuple[torch.Tensor, torch.Tensor]:
    if not fmt.quantized:
        rounded = exact.to(torch.bfloat16)
        return pack_bf16(rounded), rounded.to(torch.float32)
    codes = quantize_matrix(exact, fmt, quantizer)
    return pack_matrix(fmt, *codes), _restore(codes, fmt, *exact.shape)


def _restore(codes: Codes, fmt: ExpertFormat, rows: int, columns: int) -> torch.Tensor:
    grouped = codes.codes.reshape(rows, -1, fmt.group_size)
    return dequantize(codes._replace(codes=grouped), fmt).reshape(rows, columns)
