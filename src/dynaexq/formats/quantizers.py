"""Data-free quantisers: groups of weights -> codes, scale, offset.

All work on float32 groups [n, group_size]. Scale and offset are rounded to float16 first and the codes
chosen for the rounded values, so a decoder reproduces exactly what was measured.

* `rtn`: round to nearest between the group's minimum and maximum.
* `hqq`: half-quadratic splitting with an l_p norm (p = 0.7) on the error; scale kept, offset optimised.
  Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.
* `als`: the best of several clipped ranges, then alternating least squares of scale and offset against
  the codes. The smallest weight error, never above `rtn` in any group.
* `als-gain`: `als`, then scale and offset stretched by most of what least squares shrank. A least-squares fit
  lies closer to zero than the weights do (`<W, W'> = |W'|^2 < |W|^2`, by 10 % at 2 bits), and unlike noise that
  bias adds up over projections and layers. On the embedded model the stretch more than halves the divergence
  at 2 bits, although the weight error grows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from dynaexq.core import FormatError, OptionError
from dynaexq.formats.base import ExpertFormat

FLOAT16_MAX = 65504.0
CLIPS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
GAIN_POWER = 0.75
"""Part of the shrinkage that `als-gain` undoes, as an exponent. 1 removes the bias, 0 keeps the smallest error;
measured best at 1 and 2 bits between 0.5 and 1.25."""

CHUNK = 1 << 17
"""Weights handled at a time: keeps the working set of a quantiser in the processor's cache."""


class Codes(NamedTuple):
    """codes uint8 [n, group] (int8 patterns when symmetric), scale and offset float16 [n]."""

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None


Quantizer = Callable[[torch.Tensor, ExpertFormat], Codes]


def quantize_matrix(matrix: torch.Tensor, fmt: ExpertFormat, quantizer: str) -> Codes:
    """Quantise float32 [rows, columns]: codes [rows, columns], scale and offset [rows, groups].

    Raises:
        OptionError: unknown quantiser.
        FormatError: weights too large for float16 scales.
    """
    if quantizer not in QUANTIZERS:
        raise OptionError(f"unknown quantizer '{quantizer}'; known quantizers are {', '.join(QUANTIZERS)}")
    check_range(matrix)
    rows, columns = matrix.shape
    groups = matrix.reshape(-1, fmt.group_size)
    step = max(1, CHUNK // fmt.group_size)
    parts = [QUANTIZERS[quantizer](chunk, fmt) for chunk in torch.split(groups, step)]
    offsets = [part.offset for part in parts if part.offset is not None]
    return Codes(
        torch.cat([part.codes for part in parts]).reshape(rows, columns),
        torch.cat([part.scale for part in parts]).reshape(rows, -1),
        torch.cat(offsets).reshape(rows, -1) if offsets else None,
    )


def check_range(matrix: torch.Tensor) -> None:
    """Raise FormatError for weights that no float16 scale reaches."""
    if matrix.abs().max() > FLOAT16_MAX:
        raise FormatError(f"a weight is above {FLOAT16_MAX:.0f}, the largest that float16 scales can describe")


def dequantize(codes: Codes, fmt: ExpertFormat) -> torch.Tensor:
    """float32 values of `codes` ([n, group] or [rows, groups, group] with matching scales)."""
    values = codes.codes.view(torch.int8) if fmt.symmetric else codes.codes
    weights = values.to(torch.float32).mul_(codes.scale.to(torch.float32).unsqueeze(-1))
    return weights if codes.offset is None else weights.add_(codes.offset.to(torch.float32).unsqueeze(-1))


def round_to_nearest(groups: torch.Tensor, fmt: ExpertFormat) -> Codes:
    """`rtn`, see the module."""
    if fmt.symmetric:
        return _assign(groups, fmt, groups.abs().amax(-1) / 127, None)
    low, high = groups.aminmax(dim=-1)
    return _assign(groups, fmt, (high - low) / ((1 << fmt.bits) - 1), low)


def half_quadratic(groups: torch.Tensor, fmt: ExpertFormat, iterations: int = 20) -> Codes:
    """`hqq`, see the module. Symmetric formats have no offset to optimise: there it equals `rtn`."""
    best = round_to_nearest(groups, fmt)
    if best.offset is None:
        return best
    beta, kappa, power = 10.0, 1.01, 0.7
    scale = best.scale.to(torch.float32).unsqueeze(-1).clamp(min=1e-8)
    zero = -best.offset.to(torch.float32).unsqueeze(-1) / scale
    top = (1 << fmt.bits) - 1
    for _ in range(iterations):
        codes = (groups / scale + zero).round_().clamp_(0, top)
        error = groups - scale * (codes - zero)
        shrunk = error.abs() - error.abs().clamp(min=1e-8).pow(power - 1) / beta
        error = error.sign() * shrunk.clamp_(min=0)
        zero = (codes - (groups - error) / scale).mean(-1, keepdim=True)
        beta *= kappa
    return _assign(groups, fmt, best.scale.to(torch.float32), (-zero * scale).squeeze(-1))


def alternating_least_squares(
    groups: torch.Tensor, fmt: ExpertFormat, iterations: int = 8, weights: torch.Tensor | None = None
) -> Codes:
    """`als`, see the module. `weights` [group]: how much the error of each place in a group counts."""
    weights = torch.ones(groups.shape[-1]) if weights is None else weights
    best = round_to_nearest(groups, fmt)
    error = _squared_error(groups, best, fmt, weights)
    scale, offset = best.scale.to(torch.float32), best.offset
    candidates: list[tuple[torch.Tensor, torch.Tensor | None]]
    if offset is None:
        candidates = [(scale * clip, None) for clip in CLIPS]
    else:
        low = offset.to(torch.float32)
        span = scale * ((1 << fmt.bits) - 1)
        candidates = [(scale * clip, low + span * (1 - clip) / 2) for clip in CLIPS]
    for clipped in candidates:
        best, error = _keep_better(groups, fmt, best, error, _assign(groups, fmt, *clipped), weights)
    for _ in range(iterations):
        fitted = _assign(groups, fmt, *_fit(groups, best, fmt, weights))
        best, error = _keep_better(groups, fmt, best, error, fitted, weights)
    return best


def restore_gain(groups: torch.Tensor, fmt: ExpertFormat) -> Codes:
    """`als-gain`, see the module."""
    fitted = alternating_least_squares(groups, fmt)
    overlap = (groups * dequantize(fitted, fmt)).sum(-1)
    gain = (groups.square().sum(-1) / overlap.clamp(min=1e-12)).clamp(1, 2).pow(GAIN_POWER)
    scale = to_float16(fitted.scale.to(torch.float32) * gain)
    offset = None if fitted.offset is None else to_float16(fitted.offset.to(torch.float32) * gain)
    return Codes(fitted.codes, scale, offset)


QUANTIZERS: dict[str, Quantizer] = {
    "rtn": round_to_nearest,
    "hqq": half_quadratic,
    "als": alternating_least_squares,
    "als-gain": restore_gain,
}
DEFAULT_QUANTIZER = "als-gain"
CALIBRATED = "calibrated"
"""Of what second_order.py makes, where experts' inputs are known."""


def _assign(groups: torch.Tensor, fmt: ExpertFormat, scale: torch.Tensor, offset: torch.Tensor | None) -> Codes:
    """Round scale and offset to float16, then choose the nearest code for every weight."""
    stored_scale = to_float16(scale)
    used = stored_scale.to(torch.float32).unsqueeze(-1)
    inverse = torch.where(used == 0, 0.0, 1 / used)
    if fmt.symmetric:
        codes = (groups * inverse).round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)
        return Codes(codes, stored_scale, None)
    assert offset is not None
    stored_offset = to_float16(offset)
    shifted = groups - stored_offset.to(torch.float32).unsqueeze(-1)
    codes = (shifted * inverse).round_().clamp_(0, (1 << fmt.bits) - 1).to(torch.uint8)
    return Codes(codes, stored_scale, stored_offset)


def to_float16(values: torch.Tensor) -> torch.Tensor:
    """What scales and offsets are kept in."""
    return values.clamp(-FLOAT16_MAX, FLOAT16_MAX).to(torch.float16)


def _fit(
    groups: torch.Tensor, codes: Codes, fmt: ExpertFormat, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Least-squares scale (and offset) of every group for fixed codes."""
    values = (codes.codes.view(torch.int8) if fmt.symmetric else codes.codes).to(torch.float32)
    tiny = 1e-6 * weights.mean()
    if fmt.symmetric:
        return (values * groups) @ weights / (values.square() @ weights).clamp(min=tiny), None
    shares = weights / weights.sum()
    mean_code, mean_weight = values @ shares, groups @ shares
    centred = values - mean_code.unsqueeze(-1)
    scale = (centred * groups) @ weights / (centred.square() @ weights).clamp(min=tiny)
    return scale, mean_weight - scale * mean_code


def _squared_error(groups: torch.Tensor, codes: Codes, fmt: ExpertFormat, weights: torch.Tensor) -> torch.Tensor:
    return (groups - dequantize(codes, fmt)).square_() @ weights


def _keep_better(
    groups: torch.Tensor, fmt: ExpertFormat, best: Codes, error: torch.Tensor, candidate: Codes, weights: torch.Tensor
) -> tuple[Codes, torch.Tensor]:
    challenger = _squared_error(groups, candidate, fmt, weights)
    wins = challenger < error
    offset = None
    if best.offset is not None and candidate.offset is not None:
        offset = torch.where(wins, candidate.offset, best.offset)
    merged = Codes(
        torch.where(wins.unsqueeze(-1), candidate.codes, best.codes),
        torch.where(wins, candidate.scale, best.scale),
        offset,
    )
    return merged, torch.where(wins, challenger, error)
