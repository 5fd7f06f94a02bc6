"""Every family in slots: the tokens of a request are those of the model alone, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from dynaexq.core import OptionError
from dynaexq.engine import Engine, EngineOptions, FinishEvent, Request
from dynaexq.integrations.transformers import runtime_of
from dynaexq.integrations.transformers.kept import Kept, kept_dtype
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.integrations.transformers.sampling import TransformersWarper
from dynaexq.integrations.transformers.slot_model import WHOLE_PROMPTS, SlottedModel
from dynaexq.traffic.recorder import ClosedWindow
from dynaexq.traffic.shares import TierShares
from support.tiny_models import FAMILIES, load, write_checkpoint

GENERATOR = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(3, 256, (length,), generator=GENERATOR).tolist() for length in (5, 17, 3, 30, 80)]
COUNTS = [9, 5, 12, 5, 6]
SHARED = [*PROMPTS[4][:40], 7, 8, 9]
quiet_transformers()


def serve(engine: Engine, prompts: list[list[int]], counts: list[int], every: int) -> list[list[int]]:
    """Answers to prompts of which one more arrives every few steps."""
    answers: list[list[int]] = [[] for _ in prompts]
    failures: list[str] = []

    def listener(index: int) -> Any:
        def hear(event: Any) -> None:
            if not isinstance(event, FinishEvent):
                answers[index].append(event.token)
            elif event.error:
                failures.append(event.error)

        return hear

    coming = list(enumerate(zip(prompts, counts, strict=True)))
    steps = 0
    with torch.inference_mode():
        while coming or engine.counts().unfinished:
            if coming and steps % every == 0:
                index, (prompt, count) = coming.pop(0)
                engine.submit(Request(tuple(prompt), count, listener(index)))
            engine.step()
            steps += 1
    assert not failures
    return answers


def alone(model: Any, prompt: list[int], count: int) -> list[int]:
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1
        )
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint", family)
    plain = transformers.AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
    expected = [alone(plain, prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
    model = load(root)
    for options in (EngineOptions(), EngineOptions(step_tokens=16, chunk=16, reuse=False)):
        engine = Engine(SlottedModel(model, slots=3, room=128), TransformersWarper, options)
        assert serve(engine, PROMPTS, COUNTS, every=2) == expected
    assert engine.model.chunked is (family not in WHOLE_PROMPTS)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss", "qwen3_next"])
def test_reused_beginnings_change_nothing(family: str, tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path / "checkpoint", family))
    engine = Engine(SlottedModel(model, slots=2, room=128), TransformersWarper, EngineOptions(step_tokens=32, chunk=32))
    (first,) = serve(engine, [PROMPTS[4]], [8], every=1)
    continued = [*PROMPTS[4], *first, 11, 12]
    prompts, counts = [continued, SHARED, continued], [6, 6, 6]
    expected = [alone(model, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    assert serve(engine, prompts, counts, every=1) == expected


def test_int8_dense_and_int4_experts_are_the_same_alone_and_in_a_batch(tmp_path: Path) -> None:
    """With the native kernels, to the last bit: chunks are cut the same way, and tokens do not see each other."""
    model = load(
        write_checkpoint(tmp_path / "checkpoint", moe_intermediate_size=64), mode="static", tier="int4", dense="int8"
    )
    assert runtime_of(model).fused_layers

    def logits(slots: int, every: int, prompts: list[list[int]]) -> list[list[int]]:
        engine = Engine(
            SlottedModel(model, slots, room=128),
            TransformersWarper,
            EngineOptions(step_tokens=32, chunk=16, reuse=False),
        )
        return serve(engine, prompts, [24] * len(prompts), every)

    together = logits(6, 1, PROMPTS)
    for prompt, answer in zip(PROMPTS, together, strict=True):
        assert logits(1, 1, [prompt]) == [answer]


def test_one_step_is_one_window(tmp_path: Path) -> None:
    model = load(
        write_checkpoint(tmp_path / "checkpoint", moe_intermediate_size=64), mode="static", tier="int4", dense="int8"
    )
    runtime = runtime_of(model)
    seen: list[tuple[int, bool]] = []

    class Listener:
        shares = TierShares(np.zeros((1, 1)))

        def before_window(self) -> None:
            pass

        def after_window(self, window: ClosedWindow) -> None:
            seen.append((sum(len(layer.ids) for layer in window.layers), window.prefill))

        def close(self) -> None:
            pass

    slotted = SlottedModel(model, slots=2, room=64)
    assert not seen  # warming up is no traffic
    runtime.listener = Listener()
    engine = Engine(slotted, TransformersWarper, EngineOptions(step_tokens=8, chunk=8))
    serve(engine, [[5] * 10, [6] * 3], [4, 4], every=1)
    layers = runtime.experts.shape.layers
    assert [(tokens // layers, prefill) for tokens, prefill in seen] == [
        (8, True),  # the first prompt's first chunk
        (5, True),  # its rest, and the second prompt
        (2, False),
        (2, False),
        (2, False),
    ]


@pytest.mark.parametrize("kept", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_keys_and_values_in_fewer_bytes(family: str, kept: str, tmp_path: Path) -> None:
    """A native step and the model's own forward read the same rounded rows, and store the same."""
    model = load(write_checkpoint(tmp_path / "checkpoint", family, moe_intermediate_size=64), dense="int8")
    slotted = [SlottedModel(model, 3, 64, kept), SlottedModel(model, 3, 64, kept), SlottedModel(model, 3, 64)]
    slotted[1]._decoder = None
    assert (slotted[0]._decoder is not None) is (family == "qwen3_moe")
    tokens, slots = torch.tensor([[5, 8], [9, 4], [11, 7]]), [2, 0]
    logits = []
    for each in slotted:
        with torch.inference_mode(), each.window(prefill=False, runs=()):
            for slot, prompt in zip(slots, (PROMPTS[0], PROMPTS[1]), strict=True):
                each.prefill(slot, 0, torch.tensor(prompt))
            lengths = [len(PROMPTS[0]), len(PROMPTS[1])]
            for step in range(3):
                found = each.decode(slots, [length + step for length in lengths], tokens[step])
            logits.append(found)
    native, own, exact = logits
    assert (native - own).abs().max() < 2e-2 * exact.std()
    error = float((own - exact).abs().max() / exact.std())
    assert 0 < error < {"float16": 0.02, "bfloat16": 0.1, "int8": 0.2}[kept]
    for layers in zip(slotted[0]._cache.layers, slotted[1]._cache.layers, strict=True):
        for ours, theirs in zip(*(layer.kept for layer in layers), strict=True):
            assert ours.numbers.dtype is theirs.numbers.dtype and ours.numbers.element_size() <= 2
            assert torch.allclose(ours.numbers.float(), theirs.numbers.float(), atol=1.0 if kept == "int8" else 0.05)


def test_rows_are_rounded_to_nearest() -> None:
    """Rows of every size, too large and too small ones too."""
    rows = torch.randn(4, 16) * 10.0 ** torch.arange(-12, 8, 5).unsqueeze(1)
    rows[1, 3], rows[2, 0] = 7e4, -7e8
    for kept in (torch.float16, torch.bfloat16, torch.int8):
        held = Kept((1, 1, 4, 16), kept)
        held.store((0, 0, slice(4)), rows)
        seen = held.load((0, 0, slice(4)), torch.float32)
        step = rows.abs().amax(-1, keepdim=True) / 127 if kept is torch.int8 else rows.abs() * 2.0**-7
        wanted = rows.clamp(-65504, 65504) if kept is torch.float16 else rows
        assert ((seen - wanted).abs() <= 0.501 * step + 1e-7).all()
        held.store((0, 0, slice(1)), torch.full((1, 16), torch.nan))
        assert held.load((0, 0, slice(1)), torch.float32).isnan().all()


def test_kept_dtypes_are_checked() -> None:
    for name, message in (("int3", "unknown kv-dtype 'int3'"), ("float32", "wider than the model's")):
        with pytest.raises(OptionError, match=message):
            kept_dtype(name, torch.bfloat16)


def test_long_sequences_decode_some_at_a_time_to_the_same_bits(tmp_path: Path) -> None:
    """Copies for attention are bounded: of one full sequence in four."""
    model = load(write_checkpoint(tmp_path / "checkpoint"), mode="full", kernel="reference", activations="fp32")
    slotted = SlottedModel(model, slots=8, room=40)
    assert slotted._parts([9] * 8) == [slice(0, 8)] and slotted._parts([38] * 5) == [
        slice(0, 2), slice(2, 4), slice(4, 5)
    ]  # fmt: skip
    assert slotted._parts([1, 38, 1, 38, 38]) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    with torch.inference_mode():
        for slot in range(8):
            with slotted.window(True, ()):
                slotted.prefill(slot, 0, torch.arange(3 + slot, 33 + slot))
        everyone, tokens = list(range(8)), torch.arange(50, 58)
        with slotted.window(False, ()):
            found = slotted.decode(everyone, [30] * 8, tokens)
        for slot in everyone:
            with slotted.window(False, ()):
                assert torch.allclose(slotted.decode([slot], [30], tokens[slot : slot + 1])[0], found[slot], atol=1e-5)
