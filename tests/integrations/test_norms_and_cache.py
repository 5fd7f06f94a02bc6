from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.cache_utils import DynamicLayer

from dynaexq.integrations.transformers.cache import RoomyLayer, make_cache
from dynaexq.integrations.transformers.norms import NativeRMSNorm, replace_norms
from support.tiny_models import FAMILIES, tiny_config


class ScaledRMSNorm(nn.Module):
    """RMSNorm that multiplies by `offset + weight`, and by `extra`."""

    def __init__(self, width: int, offset: float, extra: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=dtype) * 0.1 + 1 - offset)
        self.eps, self.offset, self.extra = 1e-6, offset, extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.extra * normed * (self.offset + self.weight)


@pytest.mark.parametrize("width", [8, 64, 2048])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_are_replaced_by_what_computes_the_same(width: int, offset: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ScaledRMSNorm(width, offset))
    for shape in ((width,), (3, width), (2, 5, width), (700, width)):
        x = torch.randn(shape) * 3
        expected = ScaledRMSNorm.forward(model[0], x) if isinstance(model[0], ScaledRMSNorm) else None
        native = nn.Sequential(model[0])
        assert replace_norms(native) == (expected is not None)
        if expected is not None:
            assert isinstance(native[0], NativeRMSNorm)
            assert torch.allclose(native(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "norm",
    [
        ScaledRMSNorm(64, 0.0, extra=1.001),
        ScaledRMSNorm(64, 0.5),
        ScaledRMSNorm(60, 0.0),
        ScaledRMSNorm(64, 0.0, dtype=torch.bfloat16),
        nn.LayerNorm(64),
    ],
)
def test_other_norms_stay(norm: nn.Module) -> None:
    model = nn.Sequential(norm)
    assert replace_norms(model) == 0 and model[0] is norm


def test_a_wrong_epsilon_would_show() -> None:
    norm = ScaledRMSNorm(64, 0.0)
    norm.variance_epsilon = 1e-3  # what the name says is not what it uses
    assert replace_norms(nn.Sequential(norm)) == 0


@given(st.data())
def test_the_cache_is_the_usual_one_in_other_memory(data: st.DataObject) -> None:
    roomy, usual = RoomyLayer(data.draw(st.integers(1, 9))), DynamicLayer()
    batch = 2
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["update", "update", "update", "crop", "reorder", "repeat", "reset"]))
        if action == "update":
            tokens = data.draw(st.integers(1, 4))
            keys, values = torch.randn(batch, 2, tokens, 4), torch.randn(batch, 2, tokens, 3)
            for found, expected in zip(roomy.update(keys, values), usual.update(keys, values), strict=True):
                assert torch.equal(found, expected)
        elif usual.get_seq_length() == 0:
            continue
        elif action == "crop":
            removed = data.draw(st.integers(0, usual.get_seq_length() - 1))
            for layer in (roomy, usual):
                layer.crop(-removed)
        elif action == "reorder":
            order = torch.tensor(data.draw(st.permutations(range(batch))))
            for layer in (roomy, usual):
                layer.reorder_cache(order)
        elif action == "repeat" and batch < 8:
            batch *= 2
            for layer in (roomy, usual):
                layer.batch_repeat_interleave(2)
        elif action == "reset":
            batch = 2
            for layer in (roomy, usual):
                layer.reset()
        assert roomy.get_seq_length() == usual.get_seq_length()
        if usual.get_seq_length():
            assert torch.equal(roomy.keys, usual.keys) and torch.equal(roomy.values, usual.values)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_only_plain_attention_layers_are_made_roomy(family: str) -> None:
    config: Any = tiny_config(family)
    usual = transformers.DynamicCache(config=config)
    cache = make_cache(config, 32)
    for mine, theirs in zip(cache.layers, usual.layers, strict=True):
        assert type(mine) is (RoomyLayer if type(theirs) is DynamicLayer else type(theirs))
