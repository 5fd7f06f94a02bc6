"""Which experts will be needed: what a predictor says of every expert, and the two that need no training. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from dynaexq.core import OptionError
from dynaexq.policy.hotness import Scores

Counts = np.ndarray[Any, np.dtype[np.int64]]
Matrix = np.ndarray[Any, np.dtype[np.floating[Any]]]

HALF_LIFE = 16
"""Forward passes after which what was needed counts half: 32 and more are worse for one sequence, none for many."""

SOFTNESS, PER_LAYER = 0.35, 0.3
"""How unsure a router's scores of an earlier layer's hidden states are, in their standard deviations, and by which part
more for each layer between."""

MAX_TOKENS = 64
"""Of a pass that are looked at: more need nearly all experts anyway."""

HARDEST = 30.0
"""Beyond this, a logistic function is 0 or 1."""


class Predictor(Protocol):
    """How likely a pass needs every expert, [experts of all layers]."""

    likely: Scores
    """The next time that its layer runs."""
    usual: Scores
    """Any later time."""
    watches: bool
    """Whether it looks at hidden states."""

    def note(self, layer: int, counts: Counts, hidden: Matrix | None) -> None:
        """So many tokens of `layer` chose each expert, counts [experts]; hidden [tokens, hidden] is what routers get.

        Without hidden states, it says what can be said without.
        """

    def forget(self) -> None:
        """Go back to the beginning."""


class MovingAverage:
    """`average`: whoever was needed of late."""

    watches = False

    def __init__(self, layers: int, experts: int) -> None:
        self.likely: Scores = np.zeros(layers * experts)
        self.usual: Scores = np.zeros(layers * experts)
        self._experts, self._keep = experts, 0.5 ** (1 / HALF_LIFE)

    def note(self, layer: int, counts: Counts, hidden: Matrix | None) -> None:
        """See Predictor."""
        rows = slice(layer * self._experts, (layer + 1) * self._experts)
        self.usual[rows] += (1 - self._keep) * ((counts > 0) - self.usual[rows])
        self.likely[rows] = self.usual[rows]

    def forget(self) -> None:
        """See Predictor."""
        self.likely[:] = self.usual[:] = 0


class Routers(NamedTuple):
    """Of all MoE layers: weights [layers, experts, hidden], and how many experts a token chooses."""

    weights: Matrix
    top_k: int


def check_router_temperature(temperature: float) -> None:
    """Raise OptionError unless what routers score can be divided by it."""
    if not 0.05 <= temperature <= 20:
        raise OptionError(f"router temperature {temperature:g} is not in 0.05..20")


class PreGate:
    """`pregate`: what the routers of the following layers say to this layer's hidden states, and beyond them the moving
    average (arXiv 2308.12066, 2510.26730)."""

    watches = True

    def __init__(self, routers: Routers, reach: int) -> None:
        """Looks at so many layers ahead."""
        self._layers, self._experts, self._width = routers.weights.shape
        self._average = MovingAverage(self._layers, self._experts)
        self._routers, self._reach = routers, reach
        self.likely, self.usual = self._average.likely, self._average.usual

    def note(self, layer: int, counts: Counts, hidden: Matrix | None) -> None:
        """See Predictor."""
        self._average.note(layer, counts, None)
        following = min(self._reach, self._layers - 1 - layer)
        if hidden is None or following < 1:
            return
        scores = self._score(layer, thin(hidden), following)
        chances = chance_of_need(choice_chances(scores, self._routers.top_k))
        first = (layer + 1) * self._experts
        self.likely[first : first + chances.size] = chances.ravel()

    def forget(self) -> None:
        """See Predictor."""
        self._average.forget()

    def _score(self, layer: int, hidden: Matrix, following: int) -> Matrix:
        """Scores [tokens, following, experts]."""
        weights = self._routers.weights[layer + 1 : layer + 1 + following].reshape(-1, self._width)
        return (hidden @ weights.T).reshape(len(hidden), following, self._experts)


def choice_chances(scores: Matrix, top_k: int) -> Matrix:
    """How likely a token chooses experts by what an earlier hidden state scores, [tokens, layers, experts]: half for
    who would only just be chosen."""
    softness = SOFTNESS * (1 + PER_LAYER * np.arange(1, scores.shape[1] + 1, dtype=np.float32))[:, None]
    return logistic(standardise(scores, top_k) / softness)


def standardise(scores: Matrix, top_k: int) -> Matrix:
    """Scores [..., experts] from the middle between who is just chosen and who just not, in standard deviations."""
    if top_k >= scores.shape[-1]:
        return np.full_like(scores, HARDEST)
    ordered = np.partition(scores, (-top_k - 1, -top_k), axis=-1)
    middle = (ordered[..., -top_k] + ordered[..., -top_k - 1])[..., None] / 2
    distances: Matrix = (scores - middle) / np.maximum(scores.std(-1, keepdims=True), 1e-6)
    return distances


def logistic(x: Matrix) -> Matrix:
    """1 / (1 + exp(-x))."""
    found: Matrix = 1 / (1 + np.exp(-np.clip(x, -HARDEST, HARDEST)))
    return found


def chance_of_need(chances: Matrix) -> Matrix:
    """That any of the tokens [tokens, ...] chooses it."""
    found: Matrix = 1 - np.prod(1 - chances, axis=0)
    return found


def thin(hidden: Matrix) -> Matrix:
    """MAX_TOKENS of the tokens at most, spread over all."""
    return hidden if len(hidden) <= MAX_TOKENS else hidden[:: -(-len(hidden) // MAX_TOKENS)]
