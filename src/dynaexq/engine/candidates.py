"""The few tokens that sampling can choose: found without sorting a whole vocabulary, drawn without walking it twice."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dynaexq.engine.requests import Sampling

SPAN = 12.0
"""Tokens this far below the likeliest (e^-12 of its probability) are looked at only where the nearer ones do not do."""


class Candidates(NamedTuple):
    """Tokens, int64 [count], and their logits over the temperature, float32 [count], likeliest first."""

    ids: torch.Tensor
    logits: torch.Tensor


def narrow(logits: torch.Tensor, sampling: Sampling) -> Candidates | None:
    """What temperature, top_k, top_p and min_p leave of `logits` [vocabulary], in the order Transformers applies them.

    None where nothing is cut off, or where tokens beyond SPAN may be left: then all have to be looked at.
    """
    if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p):
        return None
    scaled = logits / sampling.temperature
    ids = (scaled > scaled.max() - SPAN).nonzero().view(-1)
    near, order = scaled[ids].sort(descending=True, stable=True)
    if sampling.top_k:
        if len(ids) < sampling.top_k:
            return None
        near, order = near[: sampling.top_k], order[: sampling.top_k]
    kept = torch.ones(len(near), dtype=torch.bool)
    if sampling.top_p < 1:
        shares = torch.exp(near - torch.logsumexp(near if sampling.top_k else scaled, -1))
        kept &= shares.cumsum(-1) - shares < sampling.top_p
    if sampling.min_p:
        kept &= torch.exp(near - near[0]) >= sampling.min_p
    count = int(kept.sum())
    if count == 0 or (count == len(near) and not sampling.top_k):
        return None
    return Candidates(ids[order[:count]], near[:count])


def draw(logits: torch.Tensor, generator: torch.Generator) -> int:
    """A place in `logits` [count], as likely as their softmax says. Raises ValueError where they are no numbers."""
    reached = torch.softmax(logits.double(), -1).cumsum(-1)
    if not reached[-1] > 0:  # NaN
        raise ValueError("the model's logits are no numbers")
    aim = torch.rand(1, dtype=torch.float64, generator=generator) * reached[-1]
    return min(int(torch.searchsorted(reached, aim, right=True)), len(logits) - 1)
