"""What errors in experts matter and what they do to outputs, from the inputs that calibration texts gave them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from dynaexq.core import ExpertKey
from dynaexq.formats import ExpertWeights
from dynaexq.formats.codec import ExpertMetrics
from dynaexq.formats.second_order import Metric
from dynaexq.integrations.transformers.source import CheckpointExperts
from dynaexq.kernels.base import LayerFunctions
from dynaexq.kernels.reference import apply_expert, apply_gate
from dynaexq.traffic.inputs import ExpertInputs, LayerInputs

PRIOR = 0.25
"""How many tokens' worth of what is known anyway is mixed in, per input: the layer's mean for gate and up, an even one
for down. An expert that texts hardly used is fitted to what its layer sees."""

OUTPUT_PRIOR = 8
"""The same for errors in outputs, in tokens: the layer's, as if its tokens had chosen the expert."""

OUTPUT_SAMPLE = 64
"""Tokens of the layer that stand for it there."""

OUTPUT_TOKENS = 1024
"""Of an expert's own tokens, how many are run through a version, at most."""

CHUNK = 1024
"""Tokens of an expert that are run through it at a time where all are."""


class _Exact(NamedTuple):
    """Of an expert that tokens chose `selections` times: `own` of these tokens, then the layer's sample, as hidden
    float32 [tokens, hidden]; what the exact expert makes of them, of the same shape; squared gate weights [tokens]."""

    key: ExpertKey
    selections: int
    own: int
    hidden: torch.Tensor
    outputs: torch.Tensor
    gains: torch.Tensor


class InputCalibration:
    """The calibration of a checkpoint's experts (see store.sources.Calibration)."""

    def __init__(self, inputs: ExpertInputs, experts: CheckpointExperts) -> None:
        self.identity, self.texts, self.sensitivity = inputs.identity, inputs.texts, inputs.sensitivity
        self._inputs, self._experts = inputs, experts
        self._exact: _Exact | None = None
        self._layer = functools.lru_cache(maxsize=1)(self._read_layer)

    def metrics(self, key: ExpertKey, weights: ExpertWeights) -> ExpertMetrics:
        """Metrics of an expert's matrices. Raises SideFileError or CheckpointError."""
        inputs, mean, functions = self._layer(key.layer)
        tokens, places = torch.where(inputs.ids == key.expert)
        hidden = inputs.hidden[tokens].to(torch.float32)
        gains = inputs.weights[tokens, places].to(torch.float32).square().unsqueeze(-1)
        gains = gains / gains.mean().clamp(min=1e-12) if len(gains) else gains
        inner = apply_gate(_to_float32(weights), hidden, functions, key.expert)
        even = inner.square().mean() if len(inner) else torch.ones(())
        gate = Metric(_mix(hidden, gains, mean))
        return ExpertMetrics(gate, gate, Metric(_mix(inner, gains, even * torch.eye(inner.shape[1]))))

    def selections(self, key: ExpertKey) -> float:
        """How often a token chooses an expert. Raises SideFileError or CheckpointError."""
        inputs = self._layer(key.layer)[0]
        return float((inputs.ids == key.expert).sum()) / len(inputs.ids)

    def output_error(self, key: ExpertKey, exact: ExpertWeights, restored: ExpertWeights) -> float:
        """What a version of an expert loses in outputs, per selection: the mean of gate weight^2 * |y' - y|^2.

        The mean is over the tokens that chose the expert, at most OUTPUT_TOKENS of them, shrunk towards what the layer
        would see if its tokens chose it, so that an expert that no token chose has a number too. Cheap for one version
        after another of the same expert.

        Args:
            exact: its weights as they are, any float dtype.
            restored: those of the version.

        Raises:
            SideFileError, CheckpointError: inputs or biases cannot be read.
        """
        if self._exact is None or self._exact.key != key:
            self._exact = self._run_exact(key, exact)
        _, total, own, hidden, outputs, gains = self._exact
        functions = self._layer(key.layer)[2]
        lost = gains * (apply_expert(restored, hidden, functions, key.expert) - outputs).square().sum(1)
        mean = float(lost[:own].mean(dtype=torch.float64)) if own else 0.0
        return (total * mean + OUTPUT_PRIOR * float(lost[own:].mean(dtype=torch.float64))) / (total + OUTPUT_PRIOR)

    def peak(self, key: ExpertKey, exact: ExpertWeights) -> float:
        """Largest absolute value in what an expert makes of its tokens; 0 with none. Raises as `output_error`."""
        inputs, _, functions = self._layer(key.layer)
        tokens, _ = torch.where(inputs.ids == key.expert)
        weights = _to_float32(exact)
        return max(
            (
                float(apply_expert(weights, inputs.hidden[part].to(torch.float32), functions, key.expert).abs().max())
                for part in torch.split(tokens, CHUNK)
                if len(part)
            ),
            default=0.0,
        )

    def _run_exact(self, key: ExpertKey, exact: ExpertWeights) -> _Exact:
        inputs, _, functions = self._layer(key.layer)
        tokens, places = torch.where(inputs.ids == key.expert)
        total, chosen = len(tokens), _spread(len(tokens), OUTPUT_TOKENS)
        tokens, places = tokens[chosen], places[chosen]
        sample = _spread(len(inputs.ids), OUTPUT_SAMPLE)
        hidden = inputs.hidden[torch.cat((tokens, sample))].to(torch.float32)
        even = inputs.weights.square().mean().expand(len(sample))
        gains = torch.cat((inputs.weights[tokens, places].square(), even))
        outputs = apply_expert(_to_float32(exact), hidden, functions, key.expert)
        return _Exact(key, total, len(tokens), hidden, outputs, gains)

    def _read_layer(self, layer: int) -> tuple[LayerInputs, torch.Tensor, LayerFunctions]:
        inputs = self._inputs.layer(layer)
        hidden = inputs.hidden.to(torch.float32)
        return inputs, hidden.t() @ hidden / len(hidden), self._experts.read_functions(layer)


def _mix(inputs: torch.Tensor, gains: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    """Mean of x x^T over inputs [tokens, columns], weighted by gains [tokens, 1], with a prior [columns, columns]."""
    extra = PRIOR * inputs.shape[1]
    return ((inputs * gains).t() @ inputs + extra * prior) / (len(inputs) + extra)


def _to_float32(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(each.to(torch.float32) for each in weights))


def _spread(count: int, limit: int) -> torch.Tensor:
    """At most `limit` of the numbers below `count`, evenly spread, int64."""
    return torch.arange(count) if count <= limit else torch.arange(limit) * count // limit
