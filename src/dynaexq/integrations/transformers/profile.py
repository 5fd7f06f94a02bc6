"""Sizes of a model, from its configuration and its meta skeleton."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from dynaexq.core import UnsupportedModelError
from dynaexq.integrations.transformers.dense import packable_layers
from dynaexq.integrations.transformers.families import ExpertLayers
from dynaexq.plan.memory import ModelProfile


def profile_model(skeleton: Any, layers: ExpertLayers) -> ModelProfile:
    """Sizes for the memory plan."""
    config = skeleton.config.get_text_config()
    experts = layers.parameter_names
    dense = sum(p.numel() for name, p in skeleton.named_parameters() if name not in experts)
    linear, embeddings = packable_layers(skeleton, layers.shape.experts)
    packable = {id(module.weight) for module in (*linear.values(), *embeddings.values())}
    others = sum(p.numel() for name, p in skeleton.named_parameters() if name not in experts and id(p) not in packable)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    per_layer, vectors = 2 * kv_heads * head_dim, 2 * kv_heads
    if getattr(config, "kv_lora_rank", None):  # latent attention: the cache holds expanded keys and values
        per_layer = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
        vectors = 2 * heads
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and context < 1:
        raise UnsupportedModelError(f"the configuration's max_position_embeddings is {context}")
    recurrent = _recurrent_layers(config)
    attending = config.num_hidden_layers - recurrent
    eager = getattr(config, "_attn_implementation", None) == "eager"
    return ModelProfile(
        shape=layers.shape,
        dense_parameters=dense,
        unpackable_parameters=others,
        matrices=tuple((module.out_features, module.in_features) for module in linear.values()),
        embeddings=tuple((module.num_embeddings, module.embedding_dim) for module in embeddings.values()),
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        max_context=context or 1 << 20,
        kv_width=per_layer * attending,
        kv_vectors=vectors * attending,
        kv_layers=attending,
        state_elements=_state_elements(config) * recurrent,
        attention_width=heads * max(head_dim, per_layer // (2 * kv_heads)),
        dense_width=_dense_width(config),
        eager_attention_heads=heads if eager else 0,
    )


def _recurrent_layers(config: Any) -> int:
    """Layers that keep a state instead of keys and values."""
    if not _state_elements(config):
        return 0
    kinds = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    return sum("Linear" in kind or "Mamba" in kind for kind in kinds)


def _state_elements(config: Any) -> int:
    """Elements of recurrent state per sequence and layer (linear attention, Mamba)."""
    if getattr(config, "linear_num_value_heads", None):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        kernel = getattr(config, "linear_conv_kernel_dim", 4)
        matrices = config.linear_key_head_dim * values
        return int(matrices + kernel * (2 * keys + values))
    if getattr(config, "mamba_d_state", None):
        inner = getattr(config, "mamba_expand", 2) * config.hidden_size
        return int(inner * (config.mamba_d_state + getattr(config, "mamba_d_conv", 4)))
    return 0


def _dense_width(config: Any) -> int:
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    if getattr(config, "n_shared_experts", None):
        shared = config.n_shared_experts * config.moe_intermediate_size
    return int(max(getattr(config, "intermediate_size", None) or 0, shared))
