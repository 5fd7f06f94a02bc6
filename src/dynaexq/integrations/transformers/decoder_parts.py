"""The parts of a decoder layer, collected for its native step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynaexq.integrations.transformers.dense import PackedLinearLayer
from dynaexq.integrations.transformers.norms import NativeRMSNorm
from dynaexq.kernels.dense import PackedMatrix
from dynaexq.kernels.native import NativeKernel
from dynaexq.native import DecoderLayer
from dynaexq.runtime import ExpertRuntime

LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class UnfitLayerError(Exception):
    """The model, or a layer, is not of the form that has a native step."""


class Watched:
    """Modules that a native call passes by: whoever hooks into one wants it called."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._hooks = self._count()

    @property
    def changed(self) -> bool:
        """Whether somebody added a hook since."""
        return self._count() != self._hooks

    def _count(self) -> int:
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in self._modules)


class NativeLayer:
    """The native step of one decoder layer: Qwen3-MoE's form, with or without norms and biases of queries and keys."""

    def __init__(self, layer: nn.Module) -> None:
        """Collect the parts of `layer`. Raises UnfitLayerError or AttributeError where it is of another form."""
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        if children(layer) != LAYER_PARTS or children(mlp) != {"gate", "experts"}:
            raise UnfitLayerError("other parts than attention, experts and two norms")
        binding = mlp.experts.dynaexq
        self.index: int = attention.layer_idx
        self.top_k: int = mlp.gate.top_k
        self.moe_layer: int = binding.layer
        self.runtime: ExpertRuntime = binding.runtime
        self._watched = Watched([layer, attention, mlp, mlp.gate, mlp.experts])
        self._held: list[Any] = []
        kernel = self.runtime.kernel
        gate = kernel.native_gate(binding.functions) if isinstance(kernel, NativeKernel) else None
        if not isinstance(kernel, NativeKernel) or gate is None:
            raise UnfitLayerError("experts go through another kernel")
        width = int(attention.head_dim)
        heads = attention.q_proj.out_features // width
        kv_heads = attention.k_proj.out_features // width
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        by_head = norms[0] is not None and norms[0].weight.shape[0] == width
        router = self._pack_router(mlp.gate.weight, kernel.activations)
        self.native = DecoderLayer(
            hidden=attention.q_proj.in_features,
            before_attention=find_norm(layer.input_layernorm, self._held),
            query=find_projection(attention.q_proj, self._held),
            key=find_projection(attention.k_proj, self._held),
            value=find_projection(attention.v_proj, self._held),
            output=find_projection(attention.o_proj, self._held),
            query_norm=find_norm(norms[0], self._held),
            key_norm=find_norm(norms[1], self._held),
            norm_by_head=by_head,
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            scaling=float(attention.scaling),
            before_experts=find_norm(layer.post_attention_layernorm, self._held),
            router=(router.native, 0),
            expert_count=router.rows,
            top_k=self.top_k,
            renormalize=bool(getattr(mlp.gate, "norm_topk_prob", True)),
            experts=kernel.layers,
            gate=gate,
        )

    @property
    def usable(self) -> bool:
        """Whether nobody watches the inside, and experts still go through the native kernel."""
        return isinstance(self.runtime.kernel, NativeKernel) and not self._watched.changed

    def _pack_router(self, weight: torch.Tensor, activations: str) -> PackedMatrix:
        """The router in bfloat16, which checkpoints keep it in. Raises UnfitLayerError where that would round."""
        if not torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight):
            raise UnfitLayerError("a router of more than bfloat16's precision")
        matrix = PackedMatrix(weight, "bf16", activations)
        self._held.append(matrix)
        return matrix


def find_norm(norm: Any, held: list[Any]) -> tuple[int, float]:
    """Weight and epsilon of a norm (None: none), as native calls take them; `held` gets what must stay alive."""
    if norm is None:
        return 0, 0.0
    if not isinstance(norm, NativeRMSNorm):
        raise UnfitLayerError(f"a norm that stays as it is: {type(norm).__name__}")
    held.append(norm.weight)
    return norm.weight.data_ptr(), norm.variance_epsilon


def find_projection(linear: Any, held: list[Any]) -> tuple[Any, int]:
    """Matrix and bias of a dense layer, as native calls take them; `held` gets what must stay alive."""
    if not isinstance(linear, PackedLinearLayer) or linear.matrix is None:
        raise UnfitLayerError("dense layers are not packed")
    bias = linear.float_bias()
    held += [linear.matrix, bias]
    return linear.matrix.native, 0 if bias is None else bias.data_ptr()


def children(module: nn.Module) -> set[str]:
    """Names of the parts of a module."""
    return {name for name, _ in module.named_children()}
