"""The attention of prompts over kept keys and values, without copying them for every query head.

Transformers repeats keys and values up to the number of query heads wherever there is a mask: at a context of 8192 and
4 heads of 128 for 32 that is 256 MiB. Torch's own kernel on the CPU reads them where they are, to the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "dynaexq"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """What Transformers' `sdpa` gives: queries [batch, heads, tokens, width] -> [batch, tokens, heads, width]."""
    grouped = key.shape[1] < query.shape[1] and query.shape[2] > 1 and attention_mask is not None
    special = any(more.get(name) is not None for name in ("position_bias", "softcap"))
    if not grouped or special or query.device.type != "cpu":
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **more
        )
        return result
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return found.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)


def use_grouped_attention(config: Any) -> None:
    """Have the model of `config` (the part for text) attend like that, where it would by `sdpa`."""
    if config._attn_implementation == "sdpa":
        config._attn_implementation = ATTENTION
