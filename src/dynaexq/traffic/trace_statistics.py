"""What a router trace says about its workload: skew, entropy, repetition, activation, hot sets. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dynaexq.traffic.trace import Column, TraceHead, TraceRows

Scores = np.ndarray[Any, np.dtype[np.float64]]

SHARES = (0.1, 0.2, 0.5)
"""Of a layer's experts, whose share of its traffic is told."""

HOT_SHARES = (0.1, 0.25)
"""Of a layer's experts, that make its hot set."""

LAGS = (1, 2, 4, 8, 16)
BATCHES = (1, 2, 4, 8, 16, 32)
CHUNKS = (16, 32, 64, 128, 256, 512)
SAMPLES = 200
"""Batches that are drawn for each size."""

KEPT_TOKENS = 16_384
"""Tokens of a trace, spread over all of it, that batches are drawn from and repetition is looked for in."""


class TraceStatistics(NamedTuple):
    """Of one trace.

    Args:
        tokens, windows, requests, seconds: how much there is; seconds from the first pass to the end of the last.
        prompt_tokens: those that belong to prompts.
        traffic: selections of every expert, [layers, experts].
        concentration: traffic of a layer's top SHARES of experts, mean over layers.
        entropy: of routing, as a share of that of even routing, mean over layers.
        repeats: by lag, how likely an expert that a request's token chose is chosen again so many tokens later; None
            where there are no such tokens.
        chance: how likely that is for tokens drawn at random.
        decode, prefill: share of a layer's experts that one pass of so many tokens activates, by tokens.
    """

    tokens: int
    windows: int
    requests: int
    seconds: float
    prompt_tokens: int
    traffic: Scores
    concentration: dict[float, float]
    entropy: float
    repeats: dict[int, float | None]
    chance: float
    decode: dict[int, float]
    prefill: dict[int, float]


def measure_trace(head: TraceHead, batches: Iterable[TraceRows], tokens: int, seed: int = 0) -> TraceStatistics:
    """Go over a trace of `tokens` rows once; `seed` decides which batches are drawn."""
    traffic = np.zeros(head.layers * head.experts)
    windows: set[int] = set()
    requests: set[int] = set()
    end, prompts, seen = 0.0, 0, 0
    kept: list[TraceRows] = []
    stride = max(1, tokens // KEPT_TOKENS)
    for rows in batches:
        places = rows.ids.astype(np.int64) + (head.experts * np.arange(head.layers))[:, None]
        traffic += np.bincount(places.ravel(), minlength=traffic.size)
        windows.update(np.unique(rows.window).tolist())
        requests.update(np.unique(rows.request[rows.request >= 0]).tolist())
        end = max(end, float((rows.started + rows.seconds).max()))
        prompts += int(rows.prefill.sum())
        if (seen // 8192) % stride == 0:  # whole pieces, so that tokens of a request stay together
            kept.append(rows)
        seen += len(rows.window)
    random = np.random.default_rng(seed)
    shares = traffic.reshape(head.layers, head.experts)
    return TraceStatistics(
        tokens=seen,
        windows=len(windows),
        requests=len(requests),
        seconds=end,
        prompt_tokens=prompts,
        traffic=shares,
        concentration={share: concentration(shares, share) for share in SHARES},
        entropy=entropy(shares),
        repeats={lag: _repeats(kept, lag) for lag in LAGS},
        chance=chance_of_repeats(shares, head.top_k),
        decode={size: each for size in BATCHES if (each := _activation(kept, head, size, False, random)) is not None},
        prefill={size: each for size in CHUNKS if (each := _activation(kept, head, size, True, random)) is not None},
    )


def concentration(traffic: Scores, share: float) -> float:
    """Share of a layer's traffic that its most used experts take, mean over layers [layers, experts]."""
    count = max(1, round(share * traffic.shape[1]))
    top = -np.sort(-traffic, 1)[:, :count].sum(1)
    return float((top / np.maximum(traffic.sum(1), 1)).mean())


def entropy(traffic: Scores) -> float:
    """Of the routing of layers [layers, experts], as a share of the entropy of even routing, mean over layers."""
    shares = traffic / np.maximum(traffic.sum(1, keepdims=True), 1)
    logs = np.log(np.where(shares > 0, shares, 1))
    return float((-(shares * logs).sum(1)).mean() / np.log(traffic.shape[1])) if traffic.shape[1] > 1 else 0.0


def chance_of_repeats(traffic: Scores, top_k: int) -> float:
    """How likely a selected expert is selected by another token drawn at random, mean over layers."""
    shares = traffic / np.maximum(traffic.sum(1, keepdims=True), 1)
    return float((shares * np.minimum(1, top_k * shares)).sum(1).mean())


def repeats(ids: Column, lag: int) -> float:
    """How likely an expert of a token is chosen again `lag` tokens later; ids [tokens, layers, top_k] in a row."""
    before, after = ids[:-lag], ids[lag:]
    return float((before[..., :, None] == after[..., None, :]).any(-1).mean())


def activation(ids: Column, experts: int) -> float:
    """Share of a layer's experts that tokens activate together, mean over layers; ids [tokens, layers, top_k]."""
    layers = ids.shape[1]
    used = np.zeros((layers, experts), np.bool_)
    used[np.arange(layers)[:, None], ids.transpose(1, 0, 2).reshape(layers, -1)] = True
    return float(used.mean())


def hot_set(traffic: Scores, share: float) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The most used `share` of every layer's experts, [layers, experts]; of equals the first."""
    count = max(1, round(share * traffic.shape[1]))
    hot = np.zeros(traffic.shape, np.bool_)
    np.put_along_axis(hot, np.argsort(-traffic, 1, kind="stable")[:, :count], True, 1)
    return hot


def overlap(first: Scores, second: Scores, share: float) -> float:
    """What part of one hot set is in the other, 0 to 1."""
    one, other = hot_set(first, share), hot_set(second, share)
    return float((one & other).sum() / one.sum())


def _repeats(kept: Sequence[TraceRows], lag: int) -> float | None:
    """Over all requests, weighted by their tokens."""
    total, weight = 0.0, 0
    for rows in kept:
        order = np.argsort(rows.request, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(rows.request[order])) + 1):
            if rows.request[part[0]] >= 0 and len(part) > lag:
                total += repeats(rows.ids[part], lag) * (len(part) - lag)
                weight += len(part) - lag
    return total / weight if weight else None


def _activation(
    kept: Sequence[TraceRows], head: TraceHead, size: int, prefill: bool, random: np.random.Generator
) -> float | None:
    """Mean over SAMPLES passes: prompts in the order they come, decoded tokens drawn from all that there are."""
    ids = [rows.ids[rows.prefill == prefill] for rows in kept]
    whole = np.concatenate(ids) if ids else np.zeros((0, head.layers, head.top_k), np.uint16)
    if len(whole) < size:
        return None
    shares = []
    for _ in range(SAMPLES):
        if prefill:
            start = int(random.integers(0, len(whole) - size + 1))
            chosen = whole[start : start + size]
        else:
            chosen = whole[random.choice(len(whole), size, replace=False)]
        shares.append(activation(chosen, head.experts))
    return float(np.mean(shares))
