"""A trained predictor at work: a corrector on what routers say ahead of time, and a network over the last tokens."""

from __future__ import annotations

import numpy as np

from dynaexq.policy.hotness import Scores
from dynaexq.policy.prediction import (
    Counts,
    Matrix,
    MovingAverage,
    Routers,
    chance_of_need,
    logistic,
    standardise,
    thin,
)
from dynaexq.predictor.files import PredictorFile

EVERY = 8
"""Passes after which the network over the last tokens is asked again: its chances are for as many at least."""

PROMPT_TOKENS = 32
"""A pass of more is taken for a prompt, after which one token follows."""

SUREST = 0.01
"""Chances below this, or above 1 less this, are those of the network alone."""

MOST_ROWS = 8
"""Of a pass, that go into the window."""


class LearnedPredictor:
    """What a predictor file says (ExpertFlow, section 2; the corrector after arXiv 2510.26730)."""

    watches = True

    def __init__(self, file: PredictorFile, routers: Routers | None) -> None:
        """`routers` are the model's; without them, the corrector does without what they say."""
        head = file.head
        self._head, self._tensors, self._routers = head, file.tensors, routers
        self._average = MovingAverage(head.layers, head.experts)
        self.likely: Scores = self._average.likely
        self.usual: Scores = self._average.usual
        self._window = TokenWindow(file)
        self._network: Scores | None = None
        """Chances that a token chooses every expert, by the network over the last tokens."""

    def note(self, layer: int, counts: Counts, hidden: Matrix | None) -> None:
        """See policy.prediction.Predictor."""
        experts = self._head.experts
        self._average.note(layer, counts, None)
        rows = slice(layer * experts, (layer + 1) * experts)
        if hidden is None:
            return
        if self._network is not None:
            self.usual[rows] = 1 - (1 - self._network[rows]) ** min(len(hidden), PROMPT_TOKENS)
            self.likely[rows] = self.usual[rows]
        few = thin(hidden)
        for distance, chances in enumerate(self.look_ahead(layer, few), 1):
            later, target = divmod(layer + distance, self._head.layers)
            follow = chances[-1:] if later and len(hidden) > PROMPT_TOKENS else chances
            self.likely[target * experts : (target + 1) * experts] = chance_of_need(follow)
        if self._head.looks_back:
            self._window.note(layer, counts, hidden)
        if self._head.looks_back and layer == self._head.layers - 1 and self._window.due:
            self._network = self._window.ask()

    def forget(self) -> None:
        """See policy.prediction.Predictor."""
        self._average.forget()
        self._network, self._window = None, TokenWindow(PredictorFile(self._head, self._tensors))

    def look_ahead(self, layer: int, hidden: Matrix) -> Matrix:
        """Chances [reach, tokens, experts] that tokens [tokens, hidden] choose experts of the layers after `layer`."""
        head, tensors = self._head, self._tensors
        inner = gelu(hidden @ tensors["corrector.down"][layer].T)
        scores = inner @ tensors["corrector.up"][layer].T + tensors["corrector.bias"][layer]
        scores = scores.reshape(len(hidden), head.reach, head.experts).transpose(1, 0, 2)
        following = min(head.reach, head.layers - 1 - layer)
        if self._routers is not None and following:
            weights = self._routers.weights[layer + 1 : layer + 1 + following]
            said = standardise(np.einsum("th,leh->lte", hidden, weights, optimize=True), head.top_k)
            scores[:following] += tensors["corrector.scale"][layer][:following, None, None] * said
        return logistic(scores)


class TokenWindow:
    """The last tokens' hidden states after the last layer and routing, and the network that is asked about them."""

    def __init__(self, file: PredictorFile) -> None:
        head = file.head
        self._head, self._tensors = head, file.tensors
        self._rows = np.zeros((head.window, head.hidden), np.float32)
        self._filled = self._next = self._passes = 0
        self._routing = np.zeros(head.layers * head.experts, np.float32)

    @property
    def due(self) -> bool:
        """Whether it is time to ask."""
        return self._filled == self._head.window and self._passes % EVERY == 0

    def note(self, layer: int, counts: Counts, hidden: Matrix) -> None:
        """See policy.prediction.Predictor: once for every layer."""
        rows = slice(layer * self._head.experts, (layer + 1) * self._head.experts)
        change = 1 - routing_weight(self._head.window)
        self._routing[rows] += change * (counts / len(hidden) - self._routing[rows])
        if layer < self._head.layers - 1:
            return
        self._passes += 1
        for row in hidden[-MOST_ROWS:]:
            self._rows[self._next] = row
            self._next = (self._next + 1) % self._head.window
            self._filled = min(self._filled + 1, self._head.window)

    def ask(self) -> Scores:
        """Chances that a token of the next passes chooses every expert, [experts of all layers]."""
        tensors = self._tensors
        given = np.concatenate((self._rows.mean(0), self._rows.std(0), self._routing))
        given = (given - tensors["window.mean"]) / tensors["window.spread"]
        inner = gelu(tensors["window.first"] @ given + tensors["window.first_bias"])
        inner = gelu(tensors["window.second"] @ inner + tensors["window.second_bias"])
        scores = tensors["window.third"] @ inner + tensors["window.third_bias"]
        found: Scores = logistic(scores + tensors["window.trust"] * log_odds(self._routing)).astype(np.float64)
        return found


def routing_weight(window: int) -> float:
    """Of the past in the moving average of routing, whose half-life is half a window."""
    return float(0.5 ** (2 / window))


def log_odds(chances: Matrix) -> Matrix:
    """Of chances, none taken for certain."""
    sure: Matrix = np.clip(chances, SUREST, 1 - SUREST)
    return np.log(sure / (1 - sure))


def gelu(x: Matrix) -> Matrix:
    """x times the logistic function of 1.702 x: what training uses too."""
    return x * logistic(1.702 * x)
