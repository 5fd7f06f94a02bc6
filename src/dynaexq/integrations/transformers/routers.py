"""The router weights of a model: what a layer's experts are chosen by, for predictors that ask them ahead of time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from dynaexq.integrations.transformers.families import ExpertLayers, top_k_of
from dynaexq.policy.prediction import Routers


def find_routers(model: Any, layers: ExpertLayers) -> Routers | None:
    """Weights [layers, experts, hidden] of the routers beside the experts; None where a layer has none of that form."""
    shape = layers.shape
    found = [_find_router(model.get_submodule(name.rpartition(".")[0]), shape) for name in layers.modules]
    weights = [each for each in found if each is not None]
    if len(weights) < len(found):
        return None
    return Routers(np.stack(weights), top_k_of(model.config))


def _find_router(block: nn.Module, shape: Any) -> Any:
    """The one matrix [experts, hidden] of a MoE block, outside of its experts."""
    matrices = [each for each in block.parameters() if tuple(each.shape) == (shape.experts, shape.expert.hidden)]
    if len(matrices) != 1 or matrices[0].is_meta:
        return None
    return matrices[0].detach().to(torch.float32).numpy()
