"""Whole expert versions: plain weights -> block of bytes, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dynaexq.core import ExpertShape
from dynaexq.formats.base import ExpertFormat, ExpertWeights
from dynaexq.formats.interleave import pack_bf16, pack_matrix, unpack_bf16, unpack_codes, unpack_matrix
from dynaexq.formats.layout import ROWS, Section, VersionLayout
from dynaexq.formats.nested import refine
from dynaexq.formats.quantizers import CALIBRATED, Codes, check_range, dequantize, quantize_matrix
from dynaexq.formats.second_order import Metric, quantize_by_inputs, quantize_nested


class Encoded(NamedTuple):
    """A finished version: uint8 [extent_bytes], and its relative weight error |W - W'| / |W| (Frobenius)."""

    block: torch.Tensor
    error: float


class ExpertMetrics(NamedTuple):
    """What errors in an expert's matrices matter, by what calibration texts gave them."""

    gate: Metric
    up: Metric
    down: Metric


class Base(NamedTuple):
    """A version that another one refines: its block, uint8 [extent_bytes], and its format."""

    block: torch.Tensor
    fmt: ExpertFormat


class _Part(NamedTuple):
    """A packed matrix, and the plain one that it stands for."""

    packed: torch.Tensor
    restored: torch.Tensor


def encode(
    weights: ExpertWeights,
    fmt: ExpertFormat,
    shape: ExpertShape,
    quantizer: str,
    metrics: ExpertMetrics | None = None,
) -> Encoded:
    """Quantise and pack one expert (any float dtype). `quantizer` does not matter for bf16.

    Raises:
        OptionError, FormatError: see VersionLayout.of and quantize_matrix.
    """
    assert not fmt.base_bits
    parts = [
        _encode_matrix(matrix.to(torch.float32), each, quantizer, metric)
        for matrix, each, metric in zip(weights, fmt.matrices, metrics or (None,) * 3, strict=True)
    ]
    return _assemble(weights, parts, fmt, shape)


def encode_nested(
    weights: ExpertWeights,
    base: Base,
    nested: ExpertFormat,
    shape: ExpertShape,
    metrics: ExpertMetrics | None = None,
) -> Encoded:
    """Quantise what one expert's version `base` lacks, see nested.py. Raises OptionError, see VersionLayout.of."""
    parts = []
    sections = VersionLayout.of(base.fmt, shape).sections
    for matrix, metric, section in zip(weights, metrics or (None,) * 3, sections, strict=True):
        exact = matrix.to(torch.float32)
        codes = unpack_matrix(base.fmt, _bytes_of(base.block, section), section.rows, section.columns)
        lower = quantize_nested(exact, metric or Metric(torch.eye(section.columns)), codes, nested)
        restored = _restore(refine(codes, lower, nested), nested, section.rows, section.columns)
        parts.append(_Part(pack_matrix(nested, lower, None, None), restored))
    return _assemble(weights, parts, nested, shape)


def _assemble(weights: ExpertWeights, parts: list[_Part], fmt: ExpertFormat, shape: ExpertShape) -> Encoded:
    layout = VersionLayout.of(fmt, shape)
    block = torch.zeros(layout.extent_bytes, dtype=torch.uint8)
    lost = total = 0.0
    for matrix, part, section in zip(weights, parts, layout.sections, strict=True):
        exact = matrix.to(torch.float32)
        assert exact.shape == (section.rows, section.columns), (exact.shape, section)
        block[section.offset : section.offset + section.nbytes] = part.packed
        lost += float((exact - part.restored).square().sum())
        total += float(exact.square().sum())
    return Encoded(block, (lost / total) ** 0.5 if total else 0.0)


def decode(block: torch.Tensor, fmt: ExpertFormat, shape: ExpertShape, base: Base | None = None) -> ExpertWeights:
    """Plain float32 weights of a version. `block` is uint8, at least the layout's payload long; `base` is what a nested
    format refines."""
    layout = VersionLayout.of(fmt, shape)
    if base is None:
        pairs = zip(fmt.matrices, layout.sections, strict=True)
        return ExpertWeights(*(decode_section(block, each, section) for each, section in pairs))
    matrices = []
    for section, below in zip(layout.sections, VersionLayout.of(base.fmt, shape).sections, strict=True):
        size = section.rows, section.columns
        records = _bytes_of(block, section).reshape(section.rows // ROWS, section.columns // fmt.group_size, -1)
        codes = unpack_matrix(base.fmt, _bytes_of(base.block, below), *size)
        matrices.append(_restore(refine(codes, unpack_codes(fmt, records), fmt), fmt, *size))
    return ExpertWeights(*matrices)


def decode_section(block: torch.Tensor, fmt: ExpertFormat, section: Section) -> torch.Tensor:
    """One matrix float32 [rows, columns] of a version's block; `fmt` is that of the matrix."""
    return decode_matrix(_bytes_of(block, section), fmt, section.rows, section.columns)


def _bytes_of(block: torch.Tensor, section: Section) -> torch.Tensor:
    return block[section.offset : section.offset + section.nbytes]


def encode_matrix(matrix: torch.Tensor, fmt: ExpertFormat, quantizer: str) -> torch.Tensor:
    """Packed form of a matrix float32 [rows, columns] by itself, uint8 [matrix_bytes]; rows are whole tiles."""
    return _encode_matrix(matrix, fmt, quantizer).packed


def decode_matrix(packed: torch.Tensor, fmt: ExpertFormat, rows: int, columns: int) -> torch.Tensor:
    """Inverse of `encode_matrix` but for rounding, float32 [rows, columns]."""
    if not fmt.quantized:
        return unpack_bf16(packed, rows, columns).to(torch.float32)
    return _restore(unpack_matrix(fmt, packed, rows, columns), fmt, rows, columns)


def _encode_matrix(exact: torch.Tensor, fmt: ExpertFormat, quantizer: str, metric: Metric | None = None) -> _Part:
    if not fmt.quantized:
        rounded = exact.to(torch.bfloat16)
        return _Part(pack_bf16(rounded), rounded.to(torch.float32))
    if metric is None or fmt.symmetric:  # at 8 bits there is next to nothing to make good
        return _part(quantize_matrix(exact, fmt, "als" if quantizer == CALIBRATED else quantizer), fmt)
    check_range(exact)
    return _part(quantize_by_inputs(exact, metric, fmt), fmt)


def _part(codes: Codes, fmt: ExpertFormat) -> _Part:
    return _Part(pack_matrix(fmt, *codes), _restore(codes, fmt, *codes.codes.shape))


def _restore(codes: Codes, fmt: ExpertFormat, rows: int, columns: int) -> torch.Tensor:
    grouped = codes.codes.reshape(rows, -1, fmt.group_size)
    return dequantize(codes._replace(codes=grouped), fmt).reshape(rows, columns)
