"""The router weights of a model: what a layer's experts are chosen by, for predictors that ask them ahead of time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from dynaexq.core import OptionError
from dynaexq.integrations.transformers.families import ExpertLayers, top_k_of
from dynaexq.integrations.transformers.source import KeyMap
from dynaexq.policy.prediction import Routers


def find_routers(model: Any, layers: ExpertLayers) -> Routers | None:
    """Weights [layers, experts, hidden] of the routers beside the experts; None where a layer has none of that form."""
    return _collect(model, layers, model.get_parameter)


def read_routers(
    skeleton: Any, layers: ExpertLayers, tensors: Iterable[str], read: Callable[[str], torch.Tensor]
) -> Routers | None:
    """The same for a model without weights, from `tensors` on disk, which `read` reads.

    Raises:
        CheckpointError, StoreError: one cannot be read.
    """
    sources = KeyMap(skeleton, list(tensors)).sources

    def find(name: str) -> torch.Tensor | None:
        names = sources[name][None] if set(sources[name]) == {None} else []
        return read(names[0]) if len(names) == 1 else None

    return _collect(skeleton, layers, find)


def _collect(model: Any, layers: ExpertLayers, find: Callable[[str], torch.Tensor | None]) -> Routers | None:
    shape, found = layers.shape, []
    for name in layers.modules:
        weight = find(router) if (router := _name_router(model, name.rpartition(".")[0], shape)) else None
        if weight is None or weight.is_meta:
            return None
        found.append(weight.detach().to(torch.float32).numpy())
    return Routers(np.stack(found), top_k_of(model.config))


def _name_router(model: Any, block: str, shape: Any) -> str | None:
    """The one matrix [experts, hidden] of a MoE block, outside of its experts."""
    size = (shape.experts, shape.expert.hidden)
    names = [name for name, each in model.get_submodule(block).named_parameters() if tuple(each.shape) == size]
    return f"{block}.{names[0]}" if len(names) == 1 else None


def set_router_temperature(model: Any, layers: ExpertLayers, temperature: float) -> None:
    """Divide what routers score by `temperature`, in place: the same experts are chosen by the same input, with weights
    further apart below 1. This changes outputs.

    Raises:
        OptionError: a router is of an unknown form.
    """
    warnings.warn(f"router temperature {temperature:g}: answers are not those of the model as it is", stacklevel=2)
    for name in layers.modules:
        router = _name_router(model, name.rpartition(".")[0], layers.shape)
        if router is None:
            raise OptionError("the routers of this model are of an unknown form; leave the router temperature out")
        module = model.get_submodule(router.rpartition(".")[0])
        with torch.no_grad():
            model.get_parameter(router).div_(temperature)
            if isinstance(bias := getattr(module, "bias", None), torch.Tensor):
                bias.div_(temperature)
