"""Sampling options as Transformers' logits processors."""

from __future__ import annotations

from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dynaexq.engine.requests import Sampling
from dynaexq.engine.sampler import Warper


def make_warper(sampling: Sampling) -> Warper | None:
    """What a sequence's options call for, in the order Transformers applies it; None where nothing does."""
    processors = LogitsProcessorList()
    if sampling.repetition != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition))
    if sampling.temperature > 0:
        if sampling.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k > 0:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            processors.append(MinPLogitsWarper(sampling.min_p))
    return processors if len(processors) else None
