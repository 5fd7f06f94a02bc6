"""Router biases that give experts a wanted share of the traffic."""

from __future__ import annotations

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

SAMPLES = 4096
"""Tokens of the simulation; shares below half a token of it cannot be told apart."""

ITERATIONS = 60
STEP = 0.4
MOST = 0.95
"""No expert is wanted by more than this part of all tokens."""


def zipf_shares(layers: int, experts: int, generator: np.random.Generator) -> Floats:
    """Shares of traffic [layers, experts] that fall as 1/rank, the ranks shuffled in each layer; rows add up to 1."""
    shares = 1 / np.arange(1, experts + 1, dtype=np.float64)
    return np.stack([generator.permutation(shares / shares.sum()) for _ in range(layers)])


def profile_shares(hotness: Floats, layers: int) -> Floats:
    """Shares [layers, experts] in proportion to `hotness` [any, experts], whose layers repeat; silent ones are even."""
    chosen = hotness[np.arange(layers) % len(hotness)]
    totals = chosen.sum(1, keepdims=True)
    return np.where(totals > 0, chosen / np.where(totals > 0, totals, 1), 1 / hotness.shape[1])


def selection_rates(shares: Floats, top_k: int) -> Floats:
    """The part of all tokens that selects each expert, for shares of traffic [experts]; adds up to `top_k`.

    What the most wanted experts cannot take goes to the others in proportion.
    """
    rates = np.zeros_like(shares)
    capped = np.zeros(len(shares), bool)
    while True:
        left = top_k - MOST * capped.sum()
        weight = shares[~capped].sum()
        rates[~capped] = left * shares[~capped] / weight if weight > 0 else left / max(1, (~capped).sum())
        over = ~capped & (rates > MOST)
        if not over.any():
            break
        capped |= over
        rates[over] = MOST
    return np.clip(rates, 0.5 / SAMPLES, MOST)


def fit_biases(shares: Floats, top_k: int, generator: np.random.Generator) -> Floats:
    """Biases [layers, experts] under which the `top_k` of `bias + N(0, 1)` select experts in these shares.

    Layers whose shares differ in order only are fitted once.
    """
    noise = generator.standard_normal((SAMPLES, shares.shape[1]))
    fitted: dict[bytes, Floats] = {}
    biases = np.empty_like(shares)
    for layer, row in enumerate(shares):
        order = np.argsort(row, kind="stable")
        key = row[order].tobytes()
        if key not in fitted:
            fitted[key] = _fit(row[order], top_k, noise)
        biases[layer, order] = fitted[key]
    return biases


def _fit(shares: Floats, top_k: int, noise: Floats) -> Floats:
    experts = len(shares)
    biases = np.zeros(experts)
    if top_k >= experts:
        return biases
    wanted = _log_odds(selection_rates(shares, top_k))
    for _ in range(ITERATIONS):
        chosen = np.argpartition(biases + noise, experts - top_k, axis=1)[:, experts - top_k :]
        found = np.bincount(chosen.reshape(-1), minlength=experts) / SAMPLES
        biases += STEP * (wanted - _log_odds(np.clip(found, 0.5 / SAMPLES, 1 - 0.5 / SAMPLES)))
        biases -= biases.mean()
    return biases


def _log_odds(rates: Floats) -> Floats:
    return np.asarray(np.log(rates / (1 - rates)), np.float64)
