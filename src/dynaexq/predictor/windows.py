"""The network over the last tokens while it learns: its examples, and the same layers as in learned.py, in torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from dynaexq.core import OptionError
from dynaexq.policy.prediction import Matrix
from dynaexq.predictor.corrector import sigmoid_gelu
from dynaexq.predictor.examples import Column, Examples
from dynaexq.predictor.files import PredictorFile, PredictorHead
from dynaexq.predictor.learned import SUREST, routing_weight

STRIDE = 4
"""Tokens between examples."""

DROPPED = 0.3
"""Of all numbers inside while it learns: there are far fewer moments than weights."""


class WindowExamples(NamedTuple):
    """Moments of requests.

    Args:
        given: float32 [moments, 2 * hidden + layers * experts]: mean and standard deviation of the last hidden states
            of a window, and the moving average of routing.
        wanted: float32 [moments, layers * experts]: what share of the tokens to come choose every expert.
        ends: the last token of every window.
        held: whether its request is held out.
    """

    given: Matrix
    wanted: Matrix
    ends: Column
    held: Column


def gather_windows(examples: Examples, window: int, ahead: int) -> WindowExamples:
    """Of all requests. Raises OptionError where no request is long enough."""
    assert examples.hidden is not None
    starts = np.flatnonzero(np.append(True, examples.following[:-1] < 0))
    lasts = np.append(starts[1:], len(examples.ids))
    parts = [
        part
        for start, last in zip(starts.tolist(), lasts.tolist(), strict=True)
        if (part := _look_at_request(examples, start, last, window, ahead)) is not None
    ]
    held = np.concatenate([part.held for part in parts]) if parts else np.zeros(0, np.bool_)
    if held.all():
        raise OptionError(
            f"no request that can be learned from has the {window + ahead} tokens that a window and what follows "
            "take; give longer ones, or a smaller --window"
        )
    return WindowExamples(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _look_at_request(examples: Examples, start: int, last: int, window: int, ahead: int) -> WindowExamples | None:
    ends = np.arange(start + window - 1, last - ahead, STRIDE)
    if not len(ends):
        return None
    assert examples.hidden is not None
    head = examples.head
    rows = examples.hidden[start:last, -1].astype(np.float64)
    chosen = np.zeros((last - start, head.layers * head.experts))
    places = examples.ids[start:last].astype(np.int64) + head.experts * np.arange(head.layers)[:, None]
    np.put_along_axis(chosen, places.reshape(last - start, -1), 1.0, 1)
    mean = _sums(rows, ends - start, window) / window
    spread = np.sqrt(np.maximum(_sums(rows**2, ends - start, window) / window - mean**2, 0))
    routing, change = np.empty_like(chosen), 1 - routing_weight(window)
    now = np.zeros(chosen.shape[1])
    for place, row in enumerate(chosen):
        now += change * (row - now)
        routing[place] = now
    wanted = _sums(chosen, ends - start + ahead, ahead) / ahead
    given = np.concatenate((mean, spread, routing[ends - start]), 1)
    return WindowExamples(given.astype(np.float32), wanted.astype(np.float32), ends, examples.held[ends])


def _sums(values: Matrix, ends: Column, count: int) -> Matrix:
    """Of `count` rows up to each of `ends`."""
    total = np.concatenate((np.zeros((1, values.shape[1])), np.cumsum(values, 0)))
    found: Matrix = total[ends + 1] - total[ends + 1 - count]
    return found


class WindowNetwork(nn.Module):
    """Logits [moments, layers * experts]."""

    def __init__(self, head: PredictorHead, given: torch.Tensor) -> None:
        """`given` are the examples, by which inputs are standardised."""
        super().__init__()
        self._drop = nn.Dropout(DROPPED)
        size = head.layers * head.experts
        self.first = nn.Linear(given.shape[1], head.middle)
        self.second = nn.Linear(head.middle, head.middle)
        self.third = nn.Linear(head.middle, size)
        with torch.no_grad():
            self.third.weight.zero_()
            self.third.bias.zero_()
        self.trust = nn.Parameter(torch.ones(size))
        self._routing = slice(2 * head.hidden, 2 * head.hidden + size)
        self.mean, self.spread = given.mean(0), given.std(0).clamp(min=1e-3)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Of given [moments, inputs]."""
        inner = self._drop((given - self.mean) / self.spread)
        for layer in (self.first, self.second):
            inner = self._drop(sigmoid_gelu(layer(inner)))
        found: torch.Tensor = self.third(inner)
        return found + self.trust * torch.logit(given[:, self._routing], SUREST)

    def load(self, file: PredictorFile) -> None:
        """Go on from an earlier predictor."""
        with torch.no_grad():
            for name, layer in self._layers().items():
                layer.weight.copy_(torch.from_numpy(file.tensors[f"window.{name}"]))
                layer.bias.copy_(torch.from_numpy(file.tensors[f"window.{name}_bias"]))
            self.trust.copy_(torch.from_numpy(file.tensors["window.trust"]))
        self.mean = torch.from_numpy(file.tensors["window.mean"])
        self.spread = torch.from_numpy(file.tensors["window.spread"])

    def tensors(self) -> dict[str, Matrix]:
        """Of the file, by name."""
        found = {"mean": self.mean.numpy(), "spread": self.spread.numpy(), "trust": self.trust.detach().numpy()}
        for name, layer in self._layers().items():
            found[name], found[f"{name}_bias"] = layer.weight.detach().numpy(), layer.bias.detach().numpy()
        return found

    def _layers(self) -> dict[str, nn.Linear]:
        return {"first": self.first, "second": self.second, "third": self.third}
