"""The plug-in's refusals, its windows, and checkpoints with missing or surplus experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dynaexq.core import CheckpointError, DynaExqError, MemoryLimitError, OptionError, StoreError, UnsupportedModelError
from dynaexq.integrations.transformers import DynaExqConfig, DynaExqQuantizer, runtime_of
from dynaexq.integrations.transformers.loading import open_experts, quiet_transformers
from dynaexq.store import PrepareOptions, prepare_store
from dynaexq.store.layer_file import layer_path
from support.files import flip_byte, silent
from support.tiny_models import tiny_config, tiny_model, write_checkpoint

quiet_transformers()
IDS = torch.tensor([[5, 6, 7, 8]])


def load(root: Path, **options: Any) -> Any:
    config = DynaExqConfig(**options)
    return transformers.AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32, quantization_config=config)


@pytest.fixture
def store(checkpoint_directory: Path, tmp_path: Path) -> Path:
    _, source = open_experts(checkpoint_directory)
    prepare_store(source, tmp_path / "store", PrepareOptions(("int2", "bf16"), 32, "rtn"), silent)
    return tmp_path / "store"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """An unsharded checkpoint whose tensors can be changed."""
    return write_checkpoint(tmp_path / "single")


def change_tensors(root: Path, change: Any) -> None:
    tensors = load_file(root / "model.safetensors")
    change(tensors)
    save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "turbo"}, "unknown mode 'turbo'; known modes are full, static"),
        ({"tier": "int4"}, "a tier goes with mode 'static'"),
        ({"mode": "static", "tier": "int5"}, "unknown tier 'int5'"),
        ({"hi_fraction": 0.5}, "no option hi_fraction"),
    ],
)
def test_unknown_or_conflicting_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        DynaExqConfig(**options)


def test_options_that_could_not_take_effect_are_refused(store: Path, checkpoint_directory: Path) -> None:
    with pytest.raises(OptionError, match="group_size was decided when"):
        load(store, group_size=64)
    with pytest.raises(OptionError, match="is a store itself"):
        load(store, store="elsewhere")
    with pytest.raises(OptionError, match="quantizer was decided when"):
        load(checkpoint_directory, store=str(store), quantizer="rtn")
    with pytest.raises(OptionError, match="mode 'static' from a checkpoint needs a tier"):
        load(checkpoint_directory, mode="static")
    with pytest.raises(OptionError, match="device_map"):
        DynaExqQuantizer(DynaExqConfig()).validate_environment(device_map={"": "cuda:0"})


def test_an_option_given_at_load_beats_the_directory(store: Path) -> None:
    assert {fmt.name for fmt in runtime_of(load(store)).experts.formats} == {"bf16"}
    assert {fmt.name for fmt in runtime_of(load(store, mode="static")).experts.formats} == {"int2"}
    with pytest.raises(StoreError, match=r"has no tier int4 \(it has int2, bf16\)"):
        load(store, mode="static", tier="int4")


def test_experts_from_a_store_with_dense_weights_from_the_checkpoint(store: Path, checkpoint_directory: Path) -> None:
    model = load(checkpoint_directory, store=str(store))
    assert torch.equal(model(IDS).logits, load(store)(IDS).logits)


def test_a_store_of_another_checkpoint_is_refused(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_model(tiny_config("qwen3_moe"), seed=1).save_pretrained(other)
    with pytest.raises(StoreError, match=r"is a store of another checkpoint \('checkpoint0'\)"):
        load(other, store=str(store))


def test_damage_is_found_at_load(store: Path) -> None:
    flip_byte(layer_path(store, 1, "bf16"), -100)
    with pytest.raises(StoreError, match="do not match their checksum"):
        load(store)
    load(store, mode="static", tier="int2")
    flip_byte(store / "model.safetensors", -1)
    with pytest.raises(StoreError, match="model.safetensors is damaged"):
        load(store, mode="static", tier="int2")


def test_the_budget_holds_before_anything_is_allocated(store: Path) -> None:
    with pytest.raises(MemoryLimitError, match="experts needs"):
        load(store, memory=100_000, fixed={"dense weights": 90_000})


def test_windows_open_and_close_with_the_forward(store: Path) -> None:
    model = load(store)
    runtime = runtime_of(model)
    table = runtime.experts.handles._table
    seen = []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(table.live_windows()))
    model(IDS)
    model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert set(seen) == {1}
    assert table.live_windows() == 0
    model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(IDS)
    assert table.live_windows() == 0


def test_the_implementation_alone_is_refused() -> None:
    config = tiny_config("qwen3_moe")
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="dynaexq")
    with pytest.raises(DynaExqError, match="not loaded with a DynaExqConfig"):
        model(IDS)


def test_missing_experts_are_named(single: Path) -> None:
    change_tensors(single, lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.experts.gate_up_proj .*: 7 tensors for 8 experts"):
        open_experts(single)


def test_experts_numbered_with_a_gap(single: Path) -> None:
    def renumber(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.experts.{}.down_proj.weight"
        tensors[name.format(8)] = tensors.pop(name.format(2))

    change_tensors(single, renumber)
    with pytest.raises(CheckpointError, match="do not count the experts from 0 to 7"):
        open_experts(single)


def test_missing_dense_weights_are_named(single: Path, store: Path) -> None:
    change_tensors(single, lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.weight"))
    with pytest.raises(CheckpointError, match=r"no weights for model.layers.0.self_attn.q_proj.weight \(1 missing"):
        open_experts(single)
    with pytest.raises(CheckpointError, match="no weights for"):
        load(single)


def test_tensors_of_parts_that_do_not_run_are_named_and_left_out(single: Path, tmp_path: Path) -> None:
    change_tensors(single, lambda tensors: tensors.update({"draft.experts.0.weight": torch.ones(4)}))
    with pytest.warns(UserWarning, match=r"1 tensors of .* are left out, such as draft.experts.0.weight"):
        _, source = open_experts(single)
    prepare_store(source, tmp_path / "store", PrepareOptions(("bf16",)), silent)
    assert "draft.experts.0.weight" not in load_file(tmp_path / "store" / "model.safetensors")


def test_experts_of_another_shape(single: Path) -> None:
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 64}))
    with pytest.raises(CheckpointError, match=r"gate of expert 0 in model.layers.0.mlp.experts has shape \[32, 64\]"):
        open_experts(single)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 10}, r"lm_head.weight in .* has shape \[256, 64\], the configuration says \[10, 64\]"),
        ({"num_key_value_heads": 1}, r"has shape \[32, 64\], the configuration says \[16, 64\]"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, with 8 experts"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, with 8 experts"),
        ({"num_hidden_layers": 10**8}, "says 100000000 layers, but there are"),
        ({"num_hidden_layers": 0}, "says 0 layers"),
        ({"num_experts": None}, "no causal language model"),
        ({"num_experts": "four"}, "no causal language model"),
        ({"decoder_sparse_step": 0}, "no causal language model"),
        ({"num_attention_heads": 0}, "."),
        ({"max_position_embeddings": 0}, "."),
        ({"hidden_size": -64}, "."),
    ],
)
def test_configurations_that_contradict_the_weights(single: Path, change: dict[str, Any], words: str) -> None:
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        open_experts(single)


def test_an_expert_stored_the_wrong_way_round(single: Path) -> None:
    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.experts.0.up_proj.weight"
        tensors[name] = tensors[name].t().contiguous()

    change_tensors(single, transpose)
    with pytest.raises(CheckpointError, match="expert 0 of model.layers.0.mlp.experts.gate_up_proj does not fit"):
        open_experts(single)


def test_weights_above_what_scales_can_hold_are_named(single: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    change_tensors(single, lambda tensors: tensors.update({name: torch.full_like(tensors[name], 1e6)}))
    _, source = open_experts(single)
    with pytest.raises(CheckpointError, match=r"expert 2 of model.layers.1.mlp.experts .* above 65504.*leave out tier"):
        prepare_store(source, tmp_path / "store", PrepareOptions(("int4",), 32), silent)


def test_prepared_directories_move(store: Path, tmp_path: Path) -> None:
    before = load(store)(IDS).logits
    moved = shutil.move(store, tmp_path / "moved")
    assert torch.equal(load(Path(moved))(IDS).logits, before)


def test_a_loaded_model_is_not_saved_as_if_it_were_plain(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not serializable|Could not save"):
        load(store).save_pretrained(tmp_path / "saved")
