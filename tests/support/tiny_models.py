"""Tiny random models of every verified family, written as real checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from dynaexq.integrations.transformers import DynaExqConfig

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
LINEAR: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
LOCAL: dict[str, Any] = {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}

# family -> (configuration class, extra options, options of BASE it does not take)
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        (),
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        (),
    ),
    "qwen3_next": ("Qwen3NextConfig", {"intermediate_size": 96, **LINEAR}, ()),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", LINEAR, ()),
    "mixtral": ("MixtralConfig", LOCAL, ()),
    "phimoe": ("PhimoeConfig", LOCAL, ()),
    "deepseek_v2": ("DeepseekV2Config", {**MLA, "topk_method": "greedy"}, ("head_dim",)),
    "deepseek_v3": ("DeepseekV3Config", {**MLA, "n_group": 2, "topk_group": 1}, ("head_dim",)),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}, ()),
    "granitemoe": ("GraniteMoeConfig", LOCAL, ("head_dim",)),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        (),
    ),
    "gpt_oss": ("GptOssConfig", {**LOCAL, "sliding_window": 64}, ()),
    "jamba": (
        "JambaConfig",
        {
            "intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        ("head_dim",),
    ),
}


def tiny_config(family: str, **overrides: Any) -> Any:
    """Configuration of a tiny model of `family`."""
    name, extra, dropped = FAMILIES[family]
    options = {key: value for key, value in BASE.items() if key not in dropped}
    return getattr(transformers, name)(**{**options, **extra, **overrides})


def tiny_model(config: Any, seed: int = 0) -> Any:
    """A model with random weights of visible variance, rounded to bfloat16."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.08)
            elif "bias" in name:
                parameter.normal_(0, 0.05)
    return model.to(torch.bfloat16)


def write_checkpoint(root: Path, family: str = "qwen3_moe", shards: int = 1, **overrides: Any) -> Path:
    """A checkpoint as Transformers saves it (per-expert keys where the family has them)."""
    model = tiny_model(tiny_config(family, **overrides))
    size = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(root, max_shard_size=size // shards if shards > 1 else "5GB")
    return root


def write_fused_checkpoint(root: Path, family: str) -> Path:
    """The same model with the fused tensors that Transformers holds in memory."""
    model = tiny_model(tiny_config(family))
    model.config.save_pretrained(root)
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(state, root / "model.safetensors", metadata={"format": "pt"})
    return root


def load(root: Path, **options: Any) -> Any:
    """The model of a checkpoint or store, loaded in float32 as `DynaExqConfig(**options)` says."""
    config = DynaExqConfig(**options)
    return transformers.AutoModelForCausalLM.from_pretrained(
        root, dtype=torch.float32, quantization_config=config
    ).eval()
