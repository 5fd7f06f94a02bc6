"""A predictor as good as one likes: it knows the trace, and is made to err (`--accuracy`)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dynaexq.core import ModelShape, OptionError
from dynaexq.policy.caching import Mask
from dynaexq.policy.hotness import Scores
from dynaexq.policy.prediction import Counts, Matrix, MovingAverage
from dynaexq.simulate.feed import Block

SEED = 0


class Oracle:
    """Names who will be needed the next time that a layer runs: so large a share of those who are, and as many others
    that the same share of those named is right, as far as a layer has others. Who is named is taken for certain, and
    who is not, not to be needed. Of later times it knows what a moving average does."""

    watches = False

    def __init__(self, shape: ModelShape, accuracy: float, needs: Iterable[Mask], seed: int = SEED) -> None:
        """`needs` says for every pass to come who is needed, [experts of all layers]."""
        self._shape, self._accuracy = (shape.layers, shape.experts), accuracy
        self._average = MovingAverage(*self._shape)
        self._needs, self._random = iter(needs), np.random.default_rng(seed)
        self.usual: Scores = self._average.usual
        self.likely: Scores = self._name_next()
        self._following = self.likely

    def note(self, layer: int, counts: Counts, hidden: Matrix | None) -> None:
        """See policy.prediction.Predictor."""
        self._average.note(layer, counts, None)
        if layer == 0:
            self._following = self._name_next()
        rows = slice(layer * len(counts), (layer + 1) * len(counts))
        self.likely[rows] = self._following[rows]

    def forget(self) -> None:
        """See policy.prediction.Predictor."""
        raise AssertionError("a simulated run begins once")

    def _name_next(self) -> Scores:
        """Whom it names for the next pass."""
        needed = next(self._needs, None)
        if needed is None:
            return np.zeros(self._shape[0] * self._shape[1])
        needed = needed.reshape(self._shape)
        right = needed & (self._random.random(self._shape) < self._accuracy)
        wrong = right.sum(1) * (1 - self._accuracy) / self._accuracy
        count = np.floor(wrong + self._random.random(len(wrong)))[:, None]
        order = np.where(needed, np.inf, self._random.random(self._shape)).argsort(1).argsort(1)
        named: Scores = (right | (~needed & (order < count))).astype(np.float64).ravel()
        return named


def list_passes(shape: ModelShape, blocks: Iterable[Block]) -> Iterable[Mask]:
    """Who is needed, pass by pass, [experts of all layers]."""
    size = shape.layers * shape.experts
    for block in blocks:
        for place in range(len(block.ends)):
            yield block.selections(block.rows(place), size) > 0


def check_accuracy(accuracy: float) -> None:
    """Raise OptionError for a share that no predictor can have."""
    if not 0 < accuracy <= 1:
        raise OptionError(f"--accuracy {accuracy:g} is not in (0, 1], a share of what is needed")
