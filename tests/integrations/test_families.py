"""Every verified family against plain Transformers, from per-expert and fused checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dynaexq.core import UnsupportedModelError
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.families import VERIFIED_FAMILIES, find_expert_layers
from dynaexq.integrations.transformers.loading import open_experts, open_skeleton, quiet_transformers
from dynaexq.store import PrepareOptions, prepare_store
from support.files import silent
from support.tiny_models import FAMILIES, tiny_config, tiny_model, write_checkpoint, write_fused_checkpoint

IDS = torch.randint(3, 256, (2, 7), generator=torch.Generator().manual_seed(1))
quiet_transformers()


def load(root: Path, config: DynaExqConfig | None = None) -> Any:
    options = {} if config is None else {"quantization_config": config}
    return transformers.AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32, **options).eval()


def answer(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return model(IDS).logits, model.generate(IDS, max_new_tokens=8, do_sample=False)


def test_the_list_of_families_is_the_list_that_is_tested() -> None:
    assert {"qwen3_5_moe_text"} | set(FAMILIES) == VERIFIED_FAMILIES


@pytest.mark.parametrize("write", [write_checkpoint, write_fused_checkpoint])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_full_mode_equals_plain_transformers(family: str, write: Any, tmp_path: Path) -> None:
    root = write(tmp_path / "checkpoint", family)
    expected, tokens = answer(load(root))
    _, source = open_experts(root)
    prepare_store(source, tmp_path / "store", PrepareOptions(("int4", "bf16"), 32, "rtn"), silent)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        full = load(tmp_path / "store")  # plain from_pretrained on the prepared directory
    logits, generated = answer(full)
    assert (logits - expected).abs().max() < 1e-3
    assert torch.equal(generated, tokens)
    runtime = runtime_of(full)
    runtime.experts.check_integrity()
    assert not [name for name, p in full.named_parameters() if "expert" in name and p.ndim == 3]

    direct = load(root, DynaExqConfig(mode="full"))  # straight from the checkpoint
    assert torch.equal(direct(IDS).logits, full(IDS).logits)

    low = load(tmp_path / "store", DynaExqConfig(mode="static", tier="int4"))
    quick = load(root, DynaExqConfig(mode="static", tier="int4", group_size=32, quantizer="rtn"))
    assert torch.equal(low(IDS).logits, quick(IDS).logits)
    change = (low(IDS).logits - expected).norm() / expected.norm()
    assert 1e-3 < change < 0.3  # int4 was really used, and is close


def test_an_expert_split_over_two_shards(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path / "checkpoint", shards=7)
    _, source = open_experts(root)
    homes: dict[str, set[Path]] = {}
    for name, entry in source.checkpoint.tensors.items():
        if ".experts." in name:
            homes.setdefault(name.rsplit(".", 2)[0], set()).add(entry.file)
    assert any(len(files) > 1 for files in homes.values())
    prepare_store(source, tmp_path / "store", PrepareOptions(("bf16",)), silent)
    assert (load(tmp_path / "store")(IDS).logits - load(root)(IDS).logits).abs().max() < 1e-3


def test_families_outside_the_interface_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.Llama4TextConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=32, intermediate_size_mlp=64, num_local_experts=8, num_experts_per_tok=1,
    )  # fmt: skip
    tiny_model(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"'llama4_text' do not go through .* verified families are"):
        open_skeleton(tmp_path, 100)


def test_dense_models_are_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96,
    )  # fmt: skip
    tiny_model(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'qwen3' is a dense model"):
        open_skeleton(tmp_path, 100)


def test_unknown_families_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(UnsupportedModelError, match="knows without remote code"):
        open_skeleton(tmp_path, 100)


def test_families_that_were_never_compared_are_warned_about() -> None:
    model = tiny_model(tiny_config("qwen3_moe"))
    model.config.model_type = "brand_new"
    with pytest.warns(UserWarning, match="'brand_new' has not been verified"):
        find_expert_layers(model)
