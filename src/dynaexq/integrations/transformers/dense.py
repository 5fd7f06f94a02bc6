"""Dense layers in packed form: modules in the place of `nn.Linear` and `nn.Embedding`, filled one by one at load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.quantizers_utils import get_module_from_name

from dynaexq.core import CheckpointError
from dynaexq.kernels.dense import PackedMatrix, PackedRows

READ_ELSEWHERE = ("dt_proj",)
"""Layers whose matrix the model's own code multiplies with (Mamba's time steps): they stay as they are."""

RELEASE_BYTES = 32 << 20
"""Weights read before their pages are given back: small beside the process, large beside the cost of doing so."""


class PackedLinearLayer(nn.Module):
    """`nn.Linear` over packed weights; `weight` is a placeholder until it is loaded."""

    def __init__(self, linear: nn.Linear, dense: str, activations: str) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._dense, self._activations = dense, activations
        self.matrix: PackedMatrix | None = None
        self._bias: torch.Tensor | None = None

    def fill(self, weight: torch.Tensor) -> None:
        """Pack `weight` [out, in]."""
        self.matrix = PackedMatrix(weight, self._dense, self._activations)
        self._parameters.pop("weight", None)
        self._is_hf_initialized = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        assert self.matrix is not None
        return self.matrix.multiply(x, self.float_bias())

    def float_bias(self) -> torch.Tensor | None:
        """The bias as the kernels want it, float32 [out]."""
        if self._bias is None and self.bias is not None:
            self._bias = self.bias.detach().to(torch.float32).contiguous()
        return self._bias

    def extra_repr(self) -> str:
        kept = self.matrix.format.name if self.matrix else "not loaded"
        return f"in_features={self.in_features}, out_features={self.out_features}, {kept}"


class PackedEmbedding(nn.Module):
    """`nn.Embedding` over packed rows; `weight` is a placeholder until it is loaded."""

    def __init__(self, embedding: nn.Embedding, dense: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.weight = embedding.weight
        self._dense, self._dtype = dense, dtype
        self.rows: PackedRows | None = None

    def fill(self, weight: torch.Tensor) -> None:
        """Pack `weight` [rows, width]."""
        self.rows = PackedRows(weight, self._dense)
        self._parameters.pop("weight", None)
        self._is_hf_initialized = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., width]."""
        assert self.rows is not None
        return self.rows.take(ids, self._dtype)


class PackOnLoad(ConversionOps):  # type: ignore[misc]
    """Takes each weight as it is read, packs it into its module, and leaves nothing behind."""

    def __init__(self, layers: DenseLayers) -> None:
        self._layers = layers

    def convert(
        self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str | None = None, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Pack the one weight in `input_dict` (Transformers' interface)."""
        (value,) = input_dict.values()
        assert full_layer_name is not None
        filled = self._layers.fill(model, full_layer_name, value[0] if isinstance(value, list) else value)
        missing = kwargs.get("missing_keys")
        if missing is not None:
            missing.difference_update(filled)
        return {}


class DenseLayers:
    """The dense layers of a model that are kept packed."""

    def __init__(
        self, model: Any, experts: int, dense: str, activations: str, release: Callable[[], None] = lambda: None
    ) -> None:
        """Put packed modules in the place of the model's (a meta skeleton's) linear layers and embeddings.

        Routers stay: whatever has no more outputs than there are experts is one, or too small to matter.
        `release` is called now and then while they are filled: the weights read so far are not needed any more.
        """
        dtype = model.dtype
        linear, embeddings = packable_layers(model, experts)
        for name, layer in linear.items():
            model.set_submodule(name, PackedLinearLayer(layer, dense, activations))
        for name, embedding in embeddings.items():
            model.set_submodule(name, PackedEmbedding(embedding, dense, dtype))
        self.names = [*linear, *embeddings]
        self._release, self._unreleased = release, 0
        self._tied = self._take_tied_weights(model)

    def is_placeholder(self, model: Any, name: str) -> bool:
        """Whether parameter `name` is a weight that is packed as it is loaded."""
        module, tensor = get_module_from_name(model, name)
        return tensor == "weight" and isinstance(module, PackedLinearLayer | PackedEmbedding)

    def fill(self, model: Any, name: str, weight: torch.Tensor) -> set[str]:
        """Pack `weight` into the layer of parameter `name` and those tied to it; returns their names."""
        names = {name, *(other for pair in self._tied.items() if name in pair for other in pair)}
        for each in names:
            module, _ = get_module_from_name(model, each)
            module.fill(weight)
        self._unreleased += weight.nbytes
        if self._unreleased >= RELEASE_BYTES:
            self._release()
            self._unreleased = 0
        return names

    def check_filled(self, model: Any) -> None:
        """Raise CheckpointError if a layer got no weights."""
        for name in self.names:
            if "weight" in model.get_submodule(name)._parameters:
                raise CheckpointError(f"the checkpoint has no weights for {name}")

    def _take_tied_weights(self, model: Any) -> dict[str, str]:
        """Ties between packed layers, taken off the model: each gets a packed form of its own."""
        ties = {
            target: source
            for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items()
            if self.is_placeholder(model, target) and self.is_placeholder(model, source)
        }
        for target in ties:
            del model.all_tied_weights_keys[target]
        return ties


def packable_layers(model: Any, experts: int) -> tuple[dict[str, nn.Linear], dict[str, nn.Embedding]]:
    """Linear layers and embeddings of a model that can be kept packed, by name."""
    modules = dict(model.named_modules())
    linear = {
        name: module
        for name, module in modules.items()
        if type(module) is nn.Linear and module.out_features > experts and name.rpartition(".")[2] not in READ_ELSEWHERE
    }
    return linear, {name: module for name, module in modules.items() if type(module) is nn.Embedding}
