"""Native decode steps: who gets them, that they change nothing but time, and when they step aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dynaexq.integrations.transformers import DynaExqConfig, decoding, runtime_of
from dynaexq.integrations.transformers.cache import cache_argument, make_cache
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.traffic import TrafficMeter
from support.tiny_models import FAMILIES, write_checkpoint

FUSED = {"qwen3_moe", "olmoe", "mixtral"}
IDS = torch.randint(3, 256, (3, 9), generator=torch.Generator().manual_seed(1))
quiet_transformers()


def load(root: Path, **options: Any) -> Any:
    config = DynaExqConfig(**{"dense": "bf16", "activations": "fp32", **options})
    return transformers.AutoModelForCausalLM.from_pretrained(
        root, dtype=torch.float32, quantization_config=config
    ).eval()


def plain(root: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()


def decode(model: Any, cache: Any, **named: Any) -> torch.Tensor:
    """Logits of a prompt, then of the rest of IDS token by token: [sequences, steps, vocabulary]."""
    argument = {cache_argument(model): cache}
    with torch.no_grad():
        logits = [model(IDS[:, :4], **argument, **named).logits[:, -1]]
        logits += [model(IDS[:, at : at + 1], **argument, **named).logits[:, -1] for at in range(4, IDS.shape[1])]
    return torch.stack(logits, 1)


def count_native_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    steps: list[int] = []
    original = decoding.FastLayer._step

    def step(self: Any, *arguments: Any) -> torch.Tensor:
        steps.append(self._index)
        return original(self, *arguments)

    monkeypatch.setattr(decoding.FastLayer, "_step", step)
    return steps


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_steps_equal_plain_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_checkpoint(tmp_path / "checkpoint", family)
    model = load(root)
    runtime = runtime_of(model)
    assert runtime.fused_layers == (runtime.experts.shape.layers if family in FUSED else 0)
    steps = count_native_steps(monkeypatch)
    found = decode(model, make_cache(model.config, 5))  # room for 5: it grows on the way
    assert len(steps) == runtime.fused_layers * 5
    reference = plain(root)
    expected = decode(reference, transformers.DynamicCache(config=reference.config))
    assert (found - expected).abs().max() < 1e-3


@pytest.mark.parametrize("bias", [False, True])
def test_biases_of_projections(bias: bool, tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint", attention_bias=bias)
    model = load(root)
    assert runtime_of(model).fused_layers == 2
    found = decode(model, make_cache(model.config, 16))
    assert (found - decode(plain(root), transformers.DynamicCache())).abs().max() < 1e-3


def test_a_sequence_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path / "checkpoint"), activations="int8", dense="int8")
    argument = cache_argument(model)

    def last(rows: slice) -> torch.Tensor:
        cache = make_cache(model.config, 16)
        with torch.no_grad():
            for at in (slice(0, 4), slice(4, 5), slice(5, 6)):
                logits: torch.Tensor = model(IDS[rows, at], **{argument: cache}).logits
        return logits

    alone = torch.cat([last(slice(row, row + 1)) for row in range(3)])
    assert (last(slice(None)) - alone).abs().max() < 1e-4  # torch's own prefill may differ in the last bits


def test_router_choices_are_recorded_as_the_layer_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_checkpoint(tmp_path / "checkpoint"))
    runtime = runtime_of(model)
    sums = []
    for cache in (make_cache(model.config, 16), transformers.DynamicCache()):
        meter = TrafficMeter(runtime.experts.shape, "mass")
        runtime.listener = meter
        steps = count_native_steps(monkeypatch)
        decode(model, cache)
        assert bool(steps) is (len(sums) == 0)
        sums.append(meter.sums)
    assert abs(sums[0] - sums[1]).max() < 1e-4 and sums[0].sum() > 0


def test_whatever_needs_more_goes_the_usual_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(write_checkpoint(tmp_path / "checkpoint"))
    steps = count_native_steps(monkeypatch)
    expected = decode(model, make_cache(model.config, 16))
    assert steps
    steps.clear()
    hook = model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)  # somebody watches
    assert torch.allclose(decode(model, make_cache(model.config, 16)), expected, atol=1e-4)
    assert set(steps) == {1}
    hook.remove()
    steps.clear()
    assert torch.allclose(decode(model, transformers.DynamicCache()), expected, atol=1e-4)
    mask = torch.ones(3, 4, dtype=torch.long)
    mask[0, :2] = 0  # left padding needs a mask in every step
    padded = model.generate(IDS[:, :4], attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert not steps and padded.shape == (3, 9)


def test_generation_is_the_same_with_and_without(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint")
    model = load(root)
    cache = {cache_argument(model): make_cache(model.config, 8)}
    found = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=12, do_sample=False, **cache)
    assert torch.equal(found, plain(root).generate(IDS, max_new_tokens=12, do_sample=False))


def test_routers_beyond_bfloat16_and_unpacked_layers_are_left_alone(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint")
    assert runtime_of(load(root, dense="full")).fused_layers == 0
    assert runtime_of(load(root, dense="full", kernel="reference", activations="fp32")).fused_layers == 0
    model = load(root)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.mul_(1.0001)
    for layer in model.model.layers:
        del layer.forward
    assert decoding.speed_up_decoding(model, 2) == 1


def test_a_layer_that_computes_something_else_is_found_out(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path / "checkpoint"))
    layers = model.model.layers
    for layer in layers:
        del layer.forward
    layers[0].self_attn.scaling *= 1.5  # the native step takes the constant over
    original = layers[1].self_attn.forward
    layers[1].self_attn.forward = lambda *a, **k: tuple(x if x is None else x * 1.2 for x in original(*a, **k))
    assert decoding.speed_up_decoding(model, 2) == 1
    assert "forward" not in vars(layers[1])
