"""A checkpoint of more than 1 GiB with plain random experts, written without holding it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.store.files import header_bytes
from support.tiny_models import tiny_config

SHAPE = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 64, "num_hidden_layers": 6}


def write_large_checkpoint(root: Path) -> Path:
    """About 1.2 GiB of bfloat16 experts in one Qwen3-MoE checkpoint."""
    config = tiny_config("qwen3_moe", **SHAPE)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(root)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, root)
    shapes = _tensor_shapes(config)
    header, end = {}, 0
    for name, shape in shapes.items():
        nbytes = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    noise = (torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.03).to(torch.bfloat16)
    with (root / "model.safetensors").open("wb") as file:
        file.write(header_bytes({"__metadata__": {"format": "pt"}, **header}))
        for number, shape in enumerate(shapes.values()):
            count = torch.Size(shape).numel()
            values = noise.roll(number * 7919)[:count] if count > shape[-1] else torch.ones(count, dtype=torch.bfloat16)
            file.write(values.contiguous().view(torch.uint8).numpy().data)
    return root


def _tensor_shapes(config: object) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocabulary = 1024, 512, 256
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(6):
        base = f"model.layers.{layer}."
        shapes |= {
            base + "input_layernorm.weight": (hidden,),
            base + "post_attention_layernorm.weight": (hidden,),
            base + "mlp.gate.weight": (64, hidden),
            base + "self_attn.q_norm.weight": (16,),
            base + "self_attn.k_norm.weight": (16,),
            base + "self_attn.q_proj.weight": (64, hidden),
            base + "self_attn.k_proj.weight": (32, hidden),
            base + "self_attn.v_proj.weight": (32, hidden),
            base + "self_attn.o_proj.weight": (hidden, 64),
        }
        for expert in range(64):
            each = f"{base}mlp.experts.{expert}."
            shapes |= {
                each + "gate_proj.weight": (inner, hidden),
                each + "up_proj.weight": (inner, hidden),
                each + "down_proj.weight": (hidden, inner),
            }
    return shapes
