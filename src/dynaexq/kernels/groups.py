"""One layer's experts in groups, for memory that does not hold all that its tokens chose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dynaexq.kernels.base import ExpertsCall, ExpertsKernel

Experts = np.ndarray[Any, np.dtype[np.int64]]


def forward_in_groups(
    kernel: ExpertsKernel, call: ExpertsCall, groups: Iterable[Experts], bring: Callable[[Experts], None]
) -> torch.Tensor:
    """What `kernel.forward(call)` gives, to rounding: each of `groups` (expert ids) is reachable after `bring(group)`.

    Outputs are kept for every choice of every token, and added up in the order of the choices.
    """
    tokens, top_k = call.ids.shape
    ids, weights, hidden = call.ids.reshape(-1), call.weights.reshape(-1, 1), call.hidden.float()
    parts = torch.empty((tokens * top_k, hidden.shape[1]), dtype=torch.float32)
    for group in groups:
        bring(group)
        chosen = torch.isin(ids, torch.from_numpy(group)).nonzero()[:, 0]
        part = replace(call, hidden=hidden[chosen // top_k], ids=ids[chosen].unsqueeze(1), weights=weights[chosen])
        parts[chosen] = kernel.forward(part)
    return parts.view(tokens, top_k, -1).sum(1).to(call.hidden.dtype)
