"""Prompts attend to kept keys and values where they are, to the bits of Transformers' own way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers.integrations import sdpa_attention

from dynaexq.integrations.transformers.attention import attend
from dynaexq.integrations.transformers.slot_model import SlottedModel
from support.tiny_models import load, write_checkpoint


@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_has_the_bits_of_transformers(heads: int, tokens: int, masked: bool) -> None:
    torch.manual_seed(0)
    query, room = torch.randn(2, 4, tokens, 16), torch.randn(2, 2, heads, 40, 16)
    key, value = room[0, :, :, :20], room[1, :, :, :20]
    mask = torch.where(torch.rand(2, 1, tokens, 20) < 0.3, torch.finfo().min, 0.0) if masked else None
    module = SimpleNamespace(num_key_value_groups=4 // heads, is_causal=True)
    results = [
        way(module, query, key, value, mask, scaling=0.3)[0]  # type: ignore[operator]
        for way in (attend, sdpa_attention.sdpa_attention_forward)
    ]
    assert results[0].shape == (2, tokens, 4, 16) and torch.equal(*results)


def test_nothing_is_repeated_for_every_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    model = SlottedModel(load(checkpoint, mode="full"), slots=1, room=64)

    def refuse(*_: object) -> None:
        raise AssertionError("keys and values are copied")

    monkeypatch.setattr(sdpa_attention, "repeat_kv", refuse)
    with torch.inference_mode(), model.window(True, ()):
        model.prefill(0, 0, torch.arange(3, 43))
