"""One token out of many: drawn as their probabilities say, without sorting a vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dynaexq.engine.requests import Sampling

SPAN = 12.0
"""Tokens this far below the likeliest (e^-12 of its probability) are looked at only where the nearer ones do not do."""

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


def draw_token(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int | None:
    """A token by temperature, top_k, top_p and min_p, in the order Transformers applies them to `logits` [vocabulary].

    None where tokens beyond SPAN may be left by the cuts, so that all have to be looked at.

    Raises:
        ValueError: the logits are no numbers.
    """
    scaled = logits.numpy() / np.float32(sampling.temperature)
    with np.errstate(invalid="ignore"):  # infinities: found right below
        shares = np.exp(scaled - scaled.max())
    if not np.isfinite(total := float(shares.sum(dtype=np.float64))):
        raise ValueError("the model's logits are no numbers")
    near = np.flatnonzero(shares > np.exp(-SPAN))
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        return _draw_of_all(shares, near, total, generator)
    near = near[np.argsort(-scaled[near], kind="stable")]
    if sampling.top_k:
        if len(near) < min(sampling.top_k, len(scaled)):
            return None
        near = near[: sampling.top_k]
        total = float(shares[near].sum(dtype=np.float64))
    count = _count_kept(shares[near], total, sampling)
    if count == len(near) < len(scaled) and not sampling.top_k:
        return None
    return int(near[draw_place(shares[near[:count]], generator)])


def draw_place(shares: Floats, generator: torch.Generator) -> int:
    """A place in `shares` [count], as likely as each is of their sum. Raises ValueError where they are no numbers."""
    reached = np.cumsum(shares, dtype=np.float64)
    if not reached[-1] > 0:  # NaN
        raise ValueError("the model's logits are no numbers")
    aim = _random(generator) * reached[-1]
    return min(int(np.searchsorted(reached, aim, side="right")), len(reached) - 1)


def _draw_of_all(shares: Floats, near: Any, total: float, generator: torch.Generator) -> int:
    """The near tokens come first in line, so that nearly always nobody looks at the others."""
    reached = np.cumsum(shares[near], dtype=np.float64)
    aim = _random(generator) * total
    if aim < reached[-1]:
        return int(near[np.searchsorted(reached, aim, side="right")])
    others = shares.copy()
    others[near] = 0
    reached = np.cumsum(others, dtype=np.float64) + reached[-1]
    return min(int(np.searchsorted(reached, aim, side="right")), int(np.flatnonzero(others).max(initial=near[-1])))


def _count_kept(shares: Floats, total: float, sampling: Sampling) -> int:
    """How many of the likeliest `shares` stay, at least one."""
    kept = np.ones(len(shares), np.bool_)
    if sampling.top_p < 1:
        kept &= (np.cumsum(shares, dtype=np.float64) - shares) < sampling.top_p * total
    if sampling.min_p:
        kept &= shares >= sampling.min_p * shares[0]
    return max(int(kept.sum()), 1)


def _random(generator: torch.Generator) -> float:
    return float(torch.rand(1, dtype=torch.float64, generator=generator))
