"""Packed dense layers in whole models: every family, tied weights, planned bytes, refusals."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dynaexq.core import CheckpointError, OptionError
from dynaexq.integrations.transformers import DynaExqConfig
from dynaexq.integrations.transformers.dense import PackedEmbedding, PackedLinearLayer
from dynaexq.integrations.transformers.loading import open_experts, quiet_transformers
from dynaexq.plan.memory import Workload, dense_bytes
from support.tiny_models import FAMILIES, load, write_checkpoint

IDS = torch.randint(3, 256, (2, 7), generator=torch.Generator().manual_seed(1))
quiet_transformers()


def packed_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, PackedLinearLayer | PackedEmbedding)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family: str, tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint", family)
    plain = transformers.AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = plain(IDS).logits
        exact = load(root, dense="bf16")
        assert (exact(IDS).logits - expected).abs().max() < 1e-3  # the checkpoint is bfloat16: nothing is lost
        assert torch.equal(
            exact.generate(IDS, max_new_tokens=5, do_sample=False),
            plain.generate(IDS, max_new_tokens=5, do_sample=False),
        )
        changes = []
        for dense in ("int8", "int4"):
            model = load(root, dense=dense)
            changes.append(float((model(IDS).logits - expected).norm() / expected.norm()))
        assert 1e-5 < changes[0] < 0.2 and changes[0] < changes[1] < 0.7  # random routers flip easily
    assert packed_layers(exact) and not packed_layers(load(root))


def test_tied_weights_are_packed_for_both_uses(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
    model = load(root, dense="bf16")
    assert isinstance(model.lm_head, PackedLinearLayer) and isinstance(model.model.embed_tokens, PackedEmbedding)
    with torch.no_grad():
        assert (model(IDS).logits - plain(IDS).logits).abs().max() < 1e-3


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dense", ["bf16", "int8", "int4"])
def test_planned_bytes_are_the_bytes_held(dense: str, tied: bool, tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint", tie_word_embeddings=tied)
    skeleton, _ = open_experts(root)
    planned = dense_bytes(skeleton.profile, Workload(1, 1, 1, 1, 4, False, dense))
    model = load(root, dense=dense)
    held = sum(p.nbytes for p in model.parameters())
    for layer in packed_layers(model):
        if isinstance(layer, PackedLinearLayer):
            held += layer.matrix.packed.nbytes
        else:
            held += layer.rows._values.nbytes + (0 if layer.rows._scale is None else layer.rows._scale.nbytes)
    assert planned == held
    full = dense_bytes(skeleton.profile, Workload(1, 1, 1, 1, 4, False))
    assert full == sum(p.nbytes for p in load(root).parameters())


def test_a_layer_without_weights_is_an_error(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint")
    tensors = load_file(root / "model.safetensors")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="o_proj"):
        load(root, dense="int8")


def test_packed_layers_need_the_native_kernel() -> None:
    with pytest.raises(OptionError, match="dense 'int8' needs the native kernel"):
        DynaExqConfig(kernel="reference", dense="int8")
    with pytest.raises(OptionError, match="unknown activations 'int4'"):
        DynaExqConfig(activations="int4")


def test_routers_stay_exact(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint")
    model = load(root, dense="int4")
    gates = [p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(gates) == 2 and all(p.dtype == torch.float32 and len(p) == 8 for p in gates)


@pytest.mark.parametrize("dense", ["full", "int8"])
def test_no_weight_keeps_the_file_it_was_read_from_mapped(dense: str, tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint", "qwen3_moe")
    config = DynaExqConfig(mode="static", tier="int4", group_size=32, dense=dense)
    model = transformers.AutoModelForCausalLM.from_pretrained(root, quantization_config=config, dtype=torch.bfloat16)
    gc.collect()
    assert str(root) not in Path("/proc/self/maps").read_text()
    assert model(IDS, use_cache=False).logits.isfinite().all()
