"""Random bytes that are weights of a wanted size: dense tensors in bfloat16, and whole expert versions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dynaexq.core import ExpertShape
from dynaexq.formats import ExpertFormat, VersionLayout
from dynaexq.formats.layout import ROWS, Section
from dynaexq.store.checkpoint import DTYPES

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Words = np.ndarray[Any, np.dtype[np.uint64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

CHUNK_WORDS = 1 << 15
"""Random words drawn at once: they are still in the processor's cache when they are written."""

ROW_SPREAD = 0.25
"""By how much the size of weights differs from row to row, at most."""

SIGN_AND_MANTISSA = np.uint64(0x807F_807F_807F_807F)


def open_stream(*key: int) -> np.random.SFC64:
    """The random stream of `key` (integers from 0 up). Its raw words are the same on every machine and release."""
    return np.random.SFC64(list(key))


@dataclass(frozen=True)
class RandomTensor:
    """One tensor of the dense part: `fill` everywhere, or normal with deviation `std` where that is not 0.

    `first`, float [rows], takes the place of the first column.
    """

    shape: tuple[int, ...]
    std: float = 0.0
    fill: float = 0.0
    dtype: str = "BF16"
    first: Floats | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape)) * _torch_dtype(self.dtype).itemsize

    def chunks(self, stream: np.random.SFC64) -> Iterator[Bytes]:
        """The tensor's bytes, some rows at a time."""
        if not self.std:
            whole = torch.full(self.shape, self.fill, dtype=_torch_dtype(self.dtype))
            yield whole.reshape(-1).view(torch.uint8).numpy()
            return
        assert self.dtype == "BF16"
        table = _to_bfloat16(self.std * _normal_quantiles())
        rows, columns = self.shape[0], int(np.prod(self.shape[1:]))
        step = max(1, 4 * CHUNK_WORDS // columns)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            drawn = stream.random_raw(-(-count * columns // 4)).view(np.uint16)[: count * columns]
            values = table[drawn].reshape(count, columns)
            if self.first is not None:
                values[:, 0] = _to_bfloat16(self.first[start : start + count])
            yield values.reshape(-1).view(np.uint8)


class RandomVersions:
    """Random versions of the experts of one layer, valid in a format, drawn one by one into the same memory."""

    def __init__(self, fmt: ExpertFormat, shape: ExpertShape, down_scale: float, stream: np.random.SFC64) -> None:
        """Weights have deviation 1/sqrt(columns), those of down `down_scale` times that."""
        layout = VersionLayout.of(fmt, shape)
        self._format = fmt
        self._stream = stream
        self._block = np.zeros(layout.extent_bytes, np.uint8)
        self._used = -(-(layout.down.offset + layout.down.nbytes) // 8)
        self._gaps: list[Bytes] = []
        self._sizes: list[tuple[Words, Words]] = []
        self._signed: list[np.ndarray[Any, np.dtype[np.int8]]] = []
        for section, each, scale in zip(layout.sections, fmt.matrices, (1.0, 1.0, down_scale), strict=True):
            following = [other.offset for other in layout.sections if other.offset > section.offset]
            end = min(following, default=layout.extent_bytes)
            self._gaps.append(self._block[section.offset + section.nbytes : end])
            self._sizes.append(self._sizes_of(section, each, scale / section.columns**0.5))
            if each.symmetric and not fmt.symmetric:
                self._signed.append(self._block[section.offset : section.offset + section.nbytes].view(np.int8))

    def draw(self) -> Bytes:
        """The next version, uint8 [extent_bytes]; it is overwritten by the next call."""
        words = self._block.view(np.uint64)
        for start in range(0, self._used, CHUNK_WORDS):
            drawn = self._stream.random_raw(min(CHUNK_WORDS, self._used - start))
            if not self._format.quantized:
                drawn &= SIGN_AND_MANTISSA
            elif self._format.symmetric:
                codes = drawn.view(np.int8)
                np.copyto(codes, 0, where=codes == -128)
            words[start : start + len(drawn)] = drawn
        for codes in self._signed:
            np.copyto(codes, 0, where=codes == -128)
        for place, sizes in self._sizes:
            if self._format.quantized:
                place[...] = sizes
            else:
                np.add(place, sizes, out=place)
        for gap in self._gaps:
            gap[...] = 0
        return self._block

    def _sizes_of(self, section: Section, fmt: ExpertFormat, std: float) -> tuple[Words, Words]:
        """Where a matrix says how large its weights are, and what it says: the same for every expert."""
        packed = self._block[section.offset : section.offset + section.nbytes].view(np.uint64)
        tiles = section.rows // ROWS
        if not fmt.quantized:  # the smallest magnitude of a tile: random mantissas are added to it
            least = np.searchsorted(_octave_sizes(), std * _row_factors(tiles, self._stream)).astype(np.uint64)
            return packed.reshape(tiles, -1), (least * np.uint64(0x0001_0001_0001_0001))[:, None]
        records = packed.reshape(tiles, section.columns // fmt.group_size, -1)
        codes = fmt.group_size * fmt.bits // 8
        factors = _row_factors(section.rows, self._stream)
        if fmt.base_bits:  # the base says it
            return records[:, :, codes:], np.zeros((1, 1, 0), np.uint64)
        scale = (std * factors / _code_deviation(fmt)).astype(np.float16).reshape(tiles, ROWS)
        parts = [scale]
        if not fmt.symmetric:
            middle = (2**fmt.bits - 1) / 2
            parts.append((-middle * scale.astype(np.float32)).astype(np.float16))
        sizes = np.concatenate(parts, 1).view(np.uint64)
        return records[:, :, codes:], sizes[:, None, :]


def _torch_dtype(name: str) -> torch.dtype:
    return {**DTYPES, "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}[name]


def _to_bfloat16(values: Floats) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Bit patterns of `values` as bfloat16."""
    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return rounded.view(torch.int16).numpy().view(np.uint16)


@functools.cache
def _normal_quantiles() -> Floats:
    """The normal distribution in 65536 equally likely values, of deviation 1."""
    steps = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    values = np.asarray(torch.special.ndtri(steps).numpy(), np.float64)
    return np.asarray(values / values.std(), np.float64)


@functools.cache
def _octave_sizes() -> Floats:
    """Root mean square of the 128 bfloat16 values from each bit pattern on (finite ones; the first 128 left flat)."""
    patterns = torch.arange(0x7F00, dtype=torch.int16).view(torch.bfloat16).to(torch.float64).numpy()
    total = np.concatenate([[0.0], np.cumsum(patterns**2)])
    return np.asarray(np.sqrt((total[128:] - total[:-128]) / 128), np.float64)


def _row_factors(rows: int, stream: np.random.SFC64) -> Floats:
    """Factors of mean square 1, within ROW_SPREAD of each other's middle."""
    uniform = (stream.random_raw(rows) >> np.uint64(11)) * 2.0**-53
    factors = 1 - ROW_SPREAD + 2 * ROW_SPREAD * uniform
    return np.asarray(factors / np.sqrt((factors**2).mean()), np.float64)


def _code_deviation(fmt: ExpertFormat) -> float:
    """Standard deviation of random codes."""
    if fmt.symmetric:
        return float((2 * sum(code * code for code in range(1, 128)) / 256) ** 0.5)
    return float(((4**fmt.bits - 1) / 12) ** 0.5)
