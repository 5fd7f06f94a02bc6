"""Decode steps of whole decoder layers in one native call, where a layer is of the common form.

At one token a sequence, Transformers' sixty small operations a layer cost as much time as the weights they stand
between, for streaming the weights sweeps their code and data out of the processor's caches. A layer is taken over only
if its native form gave the same numbers as the layer itself on a trial at load; and only for steps that need nothing
else: one token a sequence, no mask, a RoomyLayer cache, nobody watching the inside. All other calls go the usual way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynaexq.integrations.transformers.cache import RoomyLayer, cache_argument, make_cache
from dynaexq.integrations.transformers.dense import PackedLinearLayer
from dynaexq.integrations.transformers.norms import NativeRMSNorm
from dynaexq.kernels.dense import PackedMatrix
from dynaexq.kernels.native import NativeKernel
from dynaexq.kernels.threads import thread_count
from dynaexq.native import DecoderLayer

TRIAL_PAST, TRIAL_SEQUENCES = 5, 2
TOLERANCE = 0.02
"""Relative: the last bits of attention differ, and where they tip the rounding of an activation, a step of it shows
(0.2 % at 8 bits). A layer of another form is off by its whole size."""


LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


class UnfitLayerError(Exception):
    """The layer is not of the form that has a native step."""


class FastLayer:
    """The native step of one decoder layer: Qwen3-MoE's form, with or without norms and biases of queries and keys."""

    def __init__(self, layer: nn.Module) -> None:
        """Collect the parts of `layer`. Raises UnfitLayerError or AttributeError where it is of another form."""
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        if _children(layer) != LAYER_PARTS or _children(mlp) != {"gate", "experts"}:
            raise UnfitLayerError("other parts than attention, experts and two norms")
        self._watched = [attention, mlp, mlp.gate, mlp.experts]
        self._binding = mlp.experts.dynaexq
        self._forward = layer.forward
        self._index: int = attention.layer_idx
        self._top_k: int = mlp.gate.top_k
        self._held: list[Any] = []
        kernel = self._kernel
        gate = kernel.native_gate(self._binding.functions) if kernel else None
        if kernel is None or gate is None:
            raise UnfitLayerError("experts go through another kernel")
        width = int(attention.head_dim)
        heads = attention.q_proj.out_features // width
        kv_heads = attention.k_proj.out_features // width
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        by_head = norms[0] is not None and norms[0].weight.shape[0] == width
        router = self._pack_router(mlp.gate.weight, kernel.activations)
        self._native = DecoderLayer(
            hidden=attention.q_proj.in_features,
            before_attention=self._norm(layer.input_layernorm),
            query=self._projection(attention.q_proj),
            key=self._projection(attention.k_proj),
            value=self._projection(attention.v_proj),
            output=self._projection(attention.o_proj),
            query_norm=self._norm(norms[0]),
            key_norm=self._norm(norms[1]),
            norm_by_head=by_head,
            heads=heads,
            kv_heads=kv_heads,
            width=width,
            scaling=float(attention.scaling),
            before_experts=self._norm(layer.post_attention_layernorm),
            router=(router.native, 0),
            expert_count=router.rows,
            top_k=self._top_k,
            renormalize=bool(getattr(mlp.gate, "norm_topk_prob", True)),
            experts=kernel.layers,
            gate=gate,
        )

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        """One call of the layer: hidden [sequences, tokens, hidden] -> the same."""
        words = self._binding.runtime.words(self._binding.layer)
        place = self._place(hidden_states, arguments, named)
        if words is None or place is None:
            result: torch.Tensor = self._forward(hidden_states, *arguments, **named)
            return result
        return self._step(hidden_states, place, named["position_embeddings"], words)

    def _place(self, hidden: torch.Tensor, arguments: tuple[Any, ...], named: dict[str, Any]) -> RoomyLayer | None:
        """The cache layer of a call that the native step can answer; None for all others."""
        cache = named.get("cache", named.get("past_key_values"))
        if (
            hidden.shape[1] != 1
            or hidden.dtype != torch.float32
            or arguments
            or cache is None
            or named.get("position_embeddings") is None
            or named.get("attention_mask") is not None
            or self._kernel is None
            or any(module._forward_hooks or module._forward_pre_hooks for module in self._watched)
        ):
            return None
        layer = cache.layers[self._index]
        return layer if type(layer) is RoomyLayer and layer.get_seq_length() else None

    def _step(self, hidden: torch.Tensor, layer: RoomyLayer, position: Any, words: Any) -> torch.Tensor:
        hidden = hidden.contiguous()
        cosine, sine = (each.contiguous() for each in position)  # [1 or sequences, 1, width]
        sequences = hidden.shape[0]
        place = layer.append_one()
        ids = torch.empty((sequences, self._top_k), dtype=torch.int64)
        weights = torch.empty((sequences, self._top_k), dtype=torch.float32)
        out = torch.empty_like(hidden)
        stride = place.keys.stride()
        self._native.step(
            words=words,
            hidden=hidden.data_ptr(),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            position_stride=cosine.shape[-1] if cosine.shape[0] > 1 else 0,
            keys=place.keys.data_ptr(),
            values=place.values.data_ptr(),
            sequence_stride=stride[0],
            head_stride=stride[1],
            past=place.past,
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            out=out.data_ptr(),
            sequences=sequences,
            threads=thread_count(),
        )
        self._binding.runtime.record(self._binding.layer, ids, weights)
        return out

    @property
    def _kernel(self) -> NativeKernel | None:
        kernel = self._binding.runtime.kernel
        return kernel if isinstance(kernel, NativeKernel) else None

    def _norm(self, norm: Any) -> tuple[int, float]:
        if norm is None:
            return 0, 0.0
        if not isinstance(norm, NativeRMSNorm):
            raise UnfitLayerError(f"a norm that stays as it is: {type(norm).__name__}")
        self._held.append(norm.weight)
        return norm.weight.data_ptr(), norm.variance_epsilon

    def _projection(self, linear: Any) -> tuple[Any, int]:
        if not isinstance(linear, PackedLinearLayer) or linear.matrix is None:
            raise UnfitLayerError("dense layers are not packed")
        bias = linear.float_bias()
        self._held += [linear.matrix, bias]
        return linear.matrix.native, 0 if bias is None else bias.data_ptr()

    def _pack_router(self, weight: torch.Tensor, activations: str) -> PackedMatrix:
        """The router in bfloat16, which checkpoints keep it in. Raises UnfitLayerError where that would round."""
        if not torch.equal(weight.to(torch.bfloat16).to(weight.dtype), weight):
            raise UnfitLayerError("a router of more than bfloat16's precision")
        matrix = PackedMatrix(weight, "bf16", activations)
        self._held.append(matrix)
        return matrix


def speed_up_decoding(model: Any, layers: int) -> int:
    """Give decoder layers of a loaded model their native step where a trial proves it; returns how many got it."""
    decoder = getattr(model.base_model, "layers", None)
    if decoder is None or len(decoder) != layers:
        return 0
    count = 0
    for layer in decoder:
        try:
            fast = FastLayer(layer)
        except (UnfitLayerError, AttributeError, TypeError, ValueError):
            continue
        if _agrees(model, layer, fast):
            layer.forward = fast.forward
            count += 1
    return count


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _agrees(model: Any, layer: nn.Module, fast: FastLayer) -> bool:
    """Whether the native step does what the layer does, for sequences with some tokens behind them."""
    generator = torch.Generator().manual_seed(0)
    hidden = model.config.get_text_config().hidden_size
    tokens = torch.randn(TRIAL_SEQUENCES, TRIAL_PAST + 1, hidden, generator=generator)
    places = torch.arange(TRIAL_PAST + 1).unsqueeze(0)
    runtime = fast._binding.runtime
    results, argument = [], cache_argument(model)
    listener, runtime.listener = runtime.listener, None  # a trial is no traffic
    runtime.begin_window(prefill=False)
    try:
        for forward in (layer.forward, fast.forward):
            cache = make_cache(model.config, TRIAL_PAST + 1)
            for part in (slice(0, TRIAL_PAST), slice(TRIAL_PAST, None)):
                embeddings = model.base_model.rotary_emb(tokens, position_ids=places[:, part])
                with torch.no_grad():
                    result = forward(
                        tokens[:, part],
                        attention_mask=None,
                        position_ids=places[:, part],
                        **{argument: cache},
                        use_cache=True,
                        position_embeddings=embeddings,
                    )
            results.append((result, cache.layers[fast._index].keys, cache.layers[fast._index].values))
    finally:
        runtime.end_window()
        runtime.listener = listener
    return all((a - b).norm() <= TOLERANCE * a.norm() for a, b in zip(*results, strict=True))
