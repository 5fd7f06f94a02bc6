"""What errors in experts matter, from the inputs that calibration texts gave them."""

from __future__ import annotations

import functools

import torch

from dynaexq.core import ExpertKey
from dynaexq.formats import ExpertWeights
from dynaexq.formats.codec import ExpertMetrics
from dynaexq.formats.second_order import Metric
from dynaexq.integrations.transformers.source import CheckpointExperts
from dynaexq.kernels.base import LayerFunctions
from dynaexq.kernels.reference import apply_gate
from dynaexq.traffic.inputs import ExpertInputs, LayerInputs

PRIOR = 0.25
"""How many tokens' worth of what is known anyway is mixed in, per input: the layer's mean for gate and up, an even one
for down. An expert that texts hardly used is fitted to what its layer sees."""


class InputCalibration:
    """The calibration of a checkpoint's experts (see store.sources.Calibration)."""

    def __init__(self, inputs: ExpertInputs, experts: CheckpointExperts) -> None:
        self.identity, self.texts = inputs.identity, inputs.texts
        self._inputs, self._experts = inputs, experts
        self._layer = functools.lru_cache(maxsize=1)(self._read_layer)

    def metrics(self, key: ExpertKey, weights: ExpertWeights) -> ExpertMetrics:
        """Metrics of an expert's matrices. Raises SideFileError or CheckpointError."""
        inputs, mean, functions = self._layer(key.layer)
        tokens, places = torch.where(inputs.ids == key.expert)
        hidden = inputs.hidden[tokens].to(torch.float32)
        gains = inputs.weights[tokens, places].to(torch.float32).square().unsqueeze(-1)
        gains = gains / gains.mean().clamp(min=1e-12) if len(gains) else gains
        inner = apply_gate(ExpertWeights(*(each.to(torch.float32) for each in weights)), hidden, functions, key.expert)
        even = inner.square().mean() if len(inner) else torch.ones(())
        gate = Metric(_mix(hidden, gains, mean))
        return ExpertMetrics(gate, gate, Metric(_mix(inner, gains, even * torch.eye(inner.shape[1]))))

    def _read_layer(self, layer: int) -> tuple[LayerInputs, torch.Tensor, LayerFunctions]:
        inputs = self._inputs.layer(layer)
        hidden = inputs.hidden.to(torch.float32)
        return inputs, hidden.t() @ hidden / len(hidden), self._experts.read_functions(layer)


def _mix(inputs: torch.Tensor, gains: torch.Tensor, prior: torch.Tensor) -> torch.Tensor:
    """Mean of x x^T over inputs [tokens, columns], weighted by gains [tokens, 1], with a prior [columns, columns]."""
    extra = PRIOR * inputs.shape[1]
    return ((inputs * gains).t() @ inputs + extra * prior) / (len(inputs) + extra)
