"""The calibrated quantiser: codes, scales and offsets that change a matrix's outputs least on inputs it really sees.

With `H` the mean of `x x^T` over calibration inputs, it makes `(W - W') H (W - W')^T` small, row by row:

1. Codes are chosen column by column, and what a column loses is made good in the columns to its right (the method of
   Frantar et al., "GPTQ", 2022, in the order the columns have; it is the same as LDLQ of "QuIP", 2023). A group's
   scale and offset are fitted, weighted by the diagonal of `H`, when its turn comes.
2. All scales and offsets of a row are fitted at once for these codes: least squares under `H`.
3. Codes are chosen once more for the fitted scales, and the scales fitted once more for the codes.

What is nested in a format is fitted by the first step alone, within the reach of its residual, on the base's grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from dynaexq.formats.base import ExpertFormat
from dynaexq.formats.nested import fine_grid
from dynaexq.formats.quantizers import Codes, alternating_least_squares, to_float16
from dynaexq.native import choose_codes

DAMPING = 0.01
"""Part of the mean of H's diagonal that is added to it: inputs that calibration did not show."""

RIDGE = 1e-6
ROWS_AT_ONCE = 512
"""Rows whose scales are solved for together: each takes (2 * groups)^2 numbers."""


class Grid(NamedTuple):
    """Values are `scale * code + offset`: float32 [rows, groups], of one group [rows]."""

    scale: torch.Tensor
    offset: torch.Tensor

    def group(self, group: int) -> Grid:
        """Of one group."""
        return Grid(self.scale[:, group], self.offset[:, group])


class Metric:
    """How much an error of a matrix's weights matters, from inputs [tokens, columns] it sees; shared by tiers."""

    def __init__(self, second_moment: torch.Tensor) -> None:
        """`second_moment`: mean of x x^T, float32 [columns, columns]."""
        damping = DAMPING * second_moment.diagonal().mean() + torch.finfo(torch.float32).tiny
        self.hessian = second_moment + damping * torch.eye(len(second_moment))
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(self.hessian))
        self.upper = torch.linalg.cholesky(inverse, upper=True).contiguous()


def quantize_by_inputs(matrix: torch.Tensor, metric: Metric, fmt: ExpertFormat) -> Codes:
    """Quantise float32 [rows, columns] to a format with offsets.

    Returns:
        Codes uint8 [rows, columns], scale and offset float16 [rows, groups].
    """
    assert not fmt.symmetric and not fmt.base_bits
    lowest = torch.zeros(matrix.shape[::-1], dtype=torch.uint8)

    def fit(group: int, current: torch.Tensor) -> Grid:
        share = metric.hessian.diagonal()[group * fmt.group_size :][: fmt.group_size]
        fitted = alternating_least_squares(current, fmt, weights=share)
        assert fitted.offset is not None
        return Grid(fitted.scale.to(torch.float32), fitted.offset.to(torch.float32))

    codes = _choose_codes(matrix, metric, fmt, fit, lowest)
    grid = _fit_grid(matrix, metric, codes, fmt)
    codes = _choose_codes(matrix, metric, fmt, lambda group, _: grid.group(group), lowest)
    grid = _fit_grid(matrix, metric, codes, fmt)
    return Codes(codes, to_float16(grid.scale), to_float16(grid.offset))


def quantize_nested(matrix: torch.Tensor, metric: Metric, base: Codes, nested: ExpertFormat) -> torch.Tensor:
    """What a nested format adds to `base`, for float32 [rows, columns]: residuals uint8 [rows, columns]."""
    grid = Grid(*fine_grid(base, nested))
    lowest = base.codes << nested.shift
    codes = _choose_codes(matrix, metric, nested, lambda group, _: grid.group(group), lowest.t().contiguous())
    return codes - lowest


def _choose_codes(
    matrix: torch.Tensor,
    metric: Metric,
    fmt: ExpertFormat,
    grid_of: Callable[[int, torch.Tensor], Grid],
    lowest: torch.Tensor,
) -> torch.Tensor:
    """Codes uint8 [rows, columns], each column's loss made good in those to its right.

    Args:
        grid_of: of (number of a group, what is left of its weights [rows, group]).
        lowest: the least code of each weight, uint8 [columns, rows]; the format's bits reach from there.
    """
    size, reach = fmt.group_size, (1 << fmt.bits) - 1
    left = matrix.t().contiguous()  # [columns, rows]: what is still to be represented
    codes = torch.empty(left.shape, dtype=torch.uint8)
    errors = torch.empty((size, left.shape[1]))
    for group, start in enumerate(range(0, len(left), size)):
        end = start + size
        block, upper = left[start:end], metric.upper[start:end]
        scale, offset = (each.contiguous() for each in grid_of(group, block.t()))
        choose_codes(
            rows=left.shape[1],
            columns=size,
            left=block.data_ptr(),
            upper=upper[:, start:].data_ptr(),
            upper_stride=upper.stride(0),
            scale=scale.data_ptr(),
            offset=offset.data_ptr(),
            lowest=lowest[start:end].data_ptr(),
            reach=reach,
            codes=codes[start:end].data_ptr(),
            errors=errors.data_ptr(),
            threads=torch.get_num_threads(),
        )
        left[end:].addmm_(upper[:, end:].t(), errors, alpha=-1)
    return codes.t().contiguous()


def _fit_grid(matrix: torch.Tensor, metric: Metric, codes: torch.Tensor, fmt: ExpertFormat) -> Grid:
    """Scale and offset with the least loss for whole `codes` [rows, columns]."""
    parts = [
        _solve(exact, part.to(torch.float32), metric.hessian, fmt.group_size)
        for exact, part in zip(torch.split(matrix, ROWS_AT_ONCE), torch.split(codes, ROWS_AT_ONCE), strict=True)
    ]
    return Grid(*torch.cat(parts).chunk(2, 1))


def _solve(matrix: torch.Tensor, codes: torch.Tensor, hessian: torch.Tensor, size: int) -> torch.Tensor:
    """The normal equations of every row: [rows, 2 * groups], scales, then offsets."""
    rows, columns = matrix.shape
    groups = columns // size
    values = codes.reshape(rows, groups, size)
    system = torch.empty((rows, 2 * groups, 2 * groups))
    system[:, groups:, groups:] = hessian.reshape(groups, size, groups, size).sum((1, 3))
    for group in range(groups):
        seen = (values[:, group] @ hessian[group * size :][:size]).reshape(rows, groups, size)
        system[:, group, :groups] = (seen * values).sum(-1)
        system[:, group, groups:] = system[:, groups:, group] = seen.sum(-1)
    wanted = (matrix @ hessian).reshape(rows, groups, size)
    right = torch.cat(((wanted * values).sum(-1), wanted.sum(-1)), 1)
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal += RIDGE * diagonal.mean(1, keepdim=True)
    solved: torch.Tensor = torch.linalg.solve(system, right)
    return solved
