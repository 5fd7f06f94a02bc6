"""Native decode steps: who gets them, that they change nothing but time, and when they step aside."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dynaexq.integrations.transformers import decoding, runtime_of
from dynaexq.integrations.transformers.cache import cache_argument, make_cache
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.integrations.transformers.native_decoder import Cache, NativeDecoder, Sequences
from dynaexq.traffic import TrafficMeter
from support.tiny_models import FAMILIES, write_checkpoint
from support.tiny_models import load as load_checkpoint

FUSED = {"qwen3_moe", "olmoe", "mixtral"}
IDS = torch.randint(3, 256, (3, 9), generator=torch.Generator().manual_seed(1))
quiet_transformers()


def load(root: Path, **options: Any) -> Any:
    return load_checkpoint(root, **{"dense": "bf16", "activations": "fp32", **options})


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
    original = NativeDecoder.step

    def step(self: NativeDecoder, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        steps.append(len(tokens))
        return original(self, tokens, *rest)

    monkeypatch.setattr(NativeDecoder, "step", step)
    return steps


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_steps_equal_plain_transformers(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_checkpoint(tmp_path / "checkpoint", family)
    model = load(root)
    runtime = runtime_of(model)
    assert runtime.fused_layers == (runtime.experts.shape.layers if family in FUSED else 0)
    steps = count_native_steps(monkeypatch)
    found = decode(model, make_cache(model.config, 5))  # room for 5: it grows on the way
    assert steps == ([3] * 5 if family in FUSED else [])
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
    assert not steps
    hook.remove()
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
    assert decoding.speed_up_decoding(original_forward(model), 2) is None


def original_forward(model: Any) -> Any:
    """A loaded model without its native decode steps."""
    del model.forward
    return model


def scale_outputs(module: Any, factor: float) -> None:
    original = module.forward
    module.forward = lambda *a, **k: tuple(x if x is None else x * factor for x in original(*a, **k))


def test_a_model_that_computes_something_else_is_found_out(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint")
    model = original_forward(load(root))
    model.model.layers[0].self_attn.scaling *= 1.5  # the native step takes the constant over
    assert decoding.speed_up_decoding(model, 2) is not None
    scale_outputs(original_forward(model).model.layers[1].self_attn, 1.2)
    assert decoding.speed_up_decoding(model, 2) is None
    for change in (scale_embedding, shift_positions, scale_logits):
        model = original_forward(load(root))
        change(model)
        assert decoding.speed_up_decoding(model, 2) is None, change.__name__
        assert all("forward" not in vars(layer) for layer in model.model.layers)


def scale_embedding(model: Any) -> None:
    """A factor between the embedding and the first layer, in the decoder's own code."""
    original = model.model.forward

    def forward(input_ids: torch.Tensor, **named: Any) -> Any:
        return original(inputs_embeds=model.model.embed_tokens(input_ids) * 2.0, **named)

    model.model.forward = forward


def shift_positions(model: Any) -> None:
    original = model.model.forward
    model.model.forward = lambda **named: original(
        **{**named, "position_ids": torch.arange(named["input_ids"].shape[1]).unsqueeze(0) + 2}
    )


def scale_logits(model: Any) -> None:
    original = model.forward

    @functools.wraps(original)
    def forward(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        result["logits"] = result.logits * 0.5
        return result

    model.forward = forward


def test_sequences_of_different_lengths_in_slots_of_one_cache(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path / "checkpoint"), activations="int8", dense="int8")
    runtime, decoder = runtime_of(model), decoding.speed_up_decoding(original_forward(model), 2).decoder
    decoder.rotary.reach(16)
    lengths, slots, room = [5, 2, 8], [3, 0, 2], 12
    shape = (4, model.config.num_key_value_heads, room, model.config.head_dim)
    shared = [Cache(torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in decoder.layers]
    alone = []
    for row, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        cache = make_cache(model.config, room)
        with torch.no_grad():
            model(IDS[row : row + 1, :length], **{cache_argument(model): cache})
        for layer, mine in zip(cache.layers, shared, strict=True):
            mine.keys[slot, :, :length], mine.values[slot, :, :length] = layer.keys[0], layer.values[0]
        with torch.no_grad():
            alone.append(model(IDS[row : row + 1, 8:], **{cache_argument(model): cache}).logits[0, -1])
    pasts = torch.tensor(lengths, dtype=torch.int32)
    runtime.begin_window(prefill=False)
    together = decoder.step(
        IDS[:, 8].contiguous(), Sequences(pasts, torch.tensor(slots, dtype=torch.int32), pasts), shared
    )
    runtime.end_window()
    assert torch.equal(together, torch.stack(alone))
