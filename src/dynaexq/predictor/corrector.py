"""The corrector of one layer while it learns: the same sum as in learned.py, in torch."""

from __future__ import annotations

import math

import torch
from torch import nn

from dynaexq.policy.prediction import Matrix
from dynaexq.predictor.files import PredictorFile, PredictorHead

SAID = 2.0
"""What routers' standardised scores count at first: about as sure as `pregate` is of the next layer."""


class CorrectorLayer(nn.Module):
    """Logits [tokens, reach, experts] that tokens choose experts of the following layers."""

    def __init__(self, head: PredictorHead, size: float) -> None:
        """`size` is the root mean square of what routers are given."""
        super().__init__()
        self._head, self._size = head, size
        chances = head.reach * head.experts
        self.down = nn.Parameter(torch.randn(head.width, head.hidden) / math.sqrt(head.hidden))
        self.up = nn.Parameter(torch.zeros(chances, head.width))
        self.bias = nn.Parameter(torch.full((chances,), math.log(head.top_k / max(1, head.experts - head.top_k))))
        self.scale = nn.Parameter(torch.full((head.reach,), SAID))

    def forward(self, hidden: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
        """Of hidden [tokens, hidden], and what routers say [tokens, reach, experts]."""
        inner = sigmoid_gelu(hidden / self._size @ self.down.T)
        scores = (inner @ self.up.T + self.bias).view(len(hidden), self._head.reach, self._head.experts)
        return scores + self.scale[:, None] * said

    def load(self, file: PredictorFile, layer: int) -> None:
        """Go on from an earlier predictor."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.from_numpy(file.tensors[f"corrector.{name}"][layer]))
            self.down.mul_(self._size)

    def tensors(self) -> dict[str, Matrix]:
        """Of the file, by name."""
        found = {name: each.detach().numpy() for name, each in self.named_parameters()}
        return {**found, "down": found["down"] / self._size}


def sigmoid_gelu(x: torch.Tensor) -> torch.Tensor:
    """See learned.gelu."""
    return x * torch.sigmoid(1.702 * x)
