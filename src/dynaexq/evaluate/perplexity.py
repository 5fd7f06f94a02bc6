"""Perplexity by a sliding window: every token is scored once, with at least window - stride tokens before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dynaexq.core import OptionError


class Windows(NamedTuple):
    """One window: ids [1, tokens], of which the last `scored` are predicted."""

    ids: torch.Tensor
    scored: int


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log-likelihood over `tokens` scored tokens."""

    perplexity: float
    tokens: int


def cut_windows(ids: torch.Tensor, window: int, stride: int, max_tokens: int | None = None) -> list[Windows]:
    """Cut a token stream [tokens] into overlapping windows.

    Raises:
        OptionError: window or stride out of range, or fewer than two tokens.
    """
    if window < 2 or not 1 <= stride < window:
        raise OptionError(f"a window of {window} with stride {stride}: need a window of 2 or more and a smaller stride")
    if ids.numel() < 2:
        raise OptionError("the text has fewer than two tokens")
    end_of_text = ids.numel() if max_tokens is None else min(ids.numel(), max_tokens + 1)
    windows = []
    scored_to = 1  # the first token has nothing before it
    while scored_to < end_of_text:
        step = window - 1 if scored_to == 1 else stride
        end = min(end_of_text, scored_to + step)
        start = max(0, end - window)
        windows.append(Windows(ids[start:end].unsqueeze(0), end - scored_to))
        scored_to = end
    return windows


def measure_perplexity(
    score: Callable[[Windows], list[float]], windows: list[Windows], progress: Callable[[int, int, float], None]
) -> Perplexity:
    """Perplexity over `windows`. `score` gives the log-probabilities of a window's scored tokens.

    `progress(tokens done, tokens in all, perplexity so far)`.
    """
    total = sum(window.scored for window in windows)
    loss, done = 0.0, 0
    for window in windows:
        loss -= math.fsum(score(window))
        done += window.scored
        progress(done, total, math.exp(min(loss / done, 700)))
    return Perplexity(math.exp(min(loss / done, 700)), done)
