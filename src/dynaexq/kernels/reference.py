"""The reference kernel: decode each expert that is hit to float32, multiply, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from dynaexq.core import decode_handle
from dynaexq.formats import ExpertWeights
from dynaexq.kernels.base import ExpertsCall, LayerFunctions, VersionMemory


class ReferenceKernel:
    """Exact for every format and family; the yardstick for all other kernels."""

    name = "reference"
    activations = "fp32"
    instructions = "torch"
    fallback: str | None = None

    def __init__(self, memory: VersionMemory) -> None:
        self._memory = memory

    def forward(self, call: ExpertsCall) -> torch.Tensor:
        """Weighted sum over each token's experts, [tokens, hidden] in hidden's dtype.

        Products are float32 whatever the dtype of `hidden`, and each expert sees its tokens in order.
        """
        if call.arrive:
            call.arrive()
        top_k = call.ids.shape[-1]
        flat = call.ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=len(call.words)).tolist()
        tokens = order // top_k
        gains = call.weights.reshape(-1)[order].to(torch.float32).unsqueeze(-1)
        out = torch.zeros(call.hidden.shape, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            mine = tokens[start : start + count]
            hidden = call.hidden[mine].to(torch.float32)
            weights = self._memory.weights(decode_handle(int(call.words[expert])))
            result = apply_expert(weights, hidden, call.functions, expert)
            out.index_add_(0, mine, result * gains[start : start + count])
            start += count
        return out.to(call.hidden.dtype)


def apply_gate(weights: ExpertWeights, hidden: torch.Tensor, functions: LayerFunctions, expert: int) -> torch.Tensor:
    """What one expert's down projection is given: float32 [tokens, hidden] -> [tokens, intermediate]."""
    gate, up = F.linear(hidden, weights.gate), F.linear(hidden, weights.up)
    both = torch.stack((gate, up), -1).flatten(-2) if functions.interleaved else torch.cat((gate, up), -1)
    if functions.gate_up_bias is not None:
        both = both + functions.gate_up_bias[expert].to(torch.float32)
    return functions.gate(both)


def apply_expert(weights: ExpertWeights, hidden: torch.Tensor, functions: LayerFunctions, expert: int) -> torch.Tensor:
    """One expert on its tokens: float32 [tokens, hidden] -> [tokens, hidden]."""
    result = F.linear(apply_gate(weights, hidden, functions, expert), weights.down)
    return result if functions.down_bias is None else result + functions.down_bias[expert].to(torch.float32)
