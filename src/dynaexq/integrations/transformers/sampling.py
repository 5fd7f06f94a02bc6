"""Sampling options as Transformers' logits processors."""

from __future__ import annotations

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dynaexq.engine.requests import Sampling

NOTHING = torch.zeros((1, 0), dtype=torch.int64)
"""Tokens before: what cuts does not look at them."""


class TransformersWarper:
    """See `engine.sampler.Warper`: processors in the order Transformers applies them."""

    def __init__(self, sampling: Sampling) -> None:
        self._penalty = RepetitionPenaltyLogitsProcessor(sampling.repetition)
        self._cuts = LogitsProcessorList()
        if sampling.temperature not in (0.0, 1.0):
            self._cuts.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k > 0:
            self._cuts.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._cuts.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            self._cuts.append(MinPLogitsWarper(sampling.min_p))

    def penalize(self, seen: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Repetition, prompt and answer."""
        penalized: torch.Tensor = self._penalty(torch.tensor([seen]), logits.unsqueeze(0))[0]
        return penalized

    def cut(self, logits: torch.Tensor) -> torch.Tensor:
        """Temperature, top_k, top_p, min_p."""
        left: torch.Tensor = self._cuts(NOTHING, logits.unsqueeze(0))[0]
        return left
