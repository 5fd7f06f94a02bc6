"""Several models on the same windows: loss of each, and divergence from a reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dynaexq.evaluate.intervals import Floats

POSITIONS = 512
"""Positions whose full distributions are compared at a time: bounds the float32 copies of logits."""


@dataclass
class Scores:
    """Per window: negative log-likelihood, KL(reference || model), both summed over its tokens, and the tokens."""

    losses: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def arrays(self) -> tuple[Floats, Floats, Floats]:
        """losses, divergences, tokens as float64 [windows]."""
        return np.array(self.losses), np.array(self.divergences), np.array(self.tokens, np.float64)


def compare_models(
    reference: Any,
    models: Mapping[str, Any],
    windows: torch.Tensor,
    batch: int,
    progress: Callable[[int, int], None],
) -> dict[str, Scores]:
    """Score every model, and the reference as "reference", on windows [count, tokens] (first tokens aside)."""
    scores = {name: Scores() for name in ("reference", *models)}
    for start in range(0, len(windows), batch):
        ids = windows[start : start + batch]
        with torch.inference_mode():
            expected = reference(ids, use_cache=False).logits[:, :-1]
            for name, model in {"reference": reference, **models}.items():
                found = expected if model is reference else model(ids, use_cache=False).logits[:, :-1]
                for row in range(len(ids)):
                    _add_window(scores[name], expected[row], found[row], ids[row, 1:])
        progress(start + len(ids), len(windows))
    return scores


def _add_window(scores: Scores, expected: torch.Tensor, found: torch.Tensor, targets: torch.Tensor) -> None:
    loss = divergence = 0.0
    for start in range(0, len(targets), POSITIONS):
        part = slice(start, start + POSITIONS)
        p = torch.log_softmax(expected[part].to(torch.float32), -1)
        q = torch.log_softmax(found[part].to(torch.float32), -1)
        loss -= float(q.gather(-1, targets[part].unsqueeze(-1)).sum(dtype=torch.float64))
        divergence += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    scores.losses.append(loss)
    scores.divergences.append(divergence)
    scores.tokens.append(len(targets))
