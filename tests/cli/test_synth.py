"""`dynaexq synth`: geometries that load and generate, routing as asked for, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import dynaexq.integrations.transformers  # noqa: F401  (registers the loading hook)
from cli.test_cli import refuse, run
from dynaexq.core import OptionError, StoreError
from dynaexq.integrations.transformers.geometries import GEOMETRIES
from dynaexq.integrations.transformers.loading import load_tokenizer
from dynaexq.integrations.transformers.quantizer import runtime_of
from dynaexq.integrations.transformers.random_model import describe_random_model, target_shares
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.store import ExpertStore, PrepareOptions
from dynaexq.store.synthetic import write_synthetic
from dynaexq.traffic import TrafficMeter, TrafficProfile
from support.files import contents, directory_bytes, silent
from support.processes import start_command

SMALL: dict[str, Any] = {
    "vocab_size": 4100,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SHRUNK: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"head_dim": 32, "num_experts": 16, "moe_intermediate_size": 64},
    "qwen3-235b-a22b": {"head_dim": 32, "num_experts": 16, "moe_intermediate_size": 64},
    "qwen1.5-moe-a2.7b": {"num_experts": 12, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "olmoe-1b-7b": {"num_experts": 16, "intermediate_size": 64},
    "mixtral-8x7b": {"intermediate_size": 64},
    "gpt-oss-20b": {"head_dim": 32, "num_local_experts": 8, "intermediate_size": 64},
    "gpt-oss-120b": {"head_dim": 32, "num_local_experts": 8, "intermediate_size": 64},
    "phi-3.5-moe": {"num_local_experts": 8, "intermediate_size": 64},
    "qwen3-next-80b-a3b": {
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "deepseek-v2-lite": {**LATENT, "n_routed_experts": 16, "moe_intermediate_size": 64, "intermediate_size": 96},
}
"""What makes each geometry small enough for a test."""


def write(root: Path, geometry: str, routing: Any = "uniform", tiers: tuple[str, ...] = ("int4",), **more: Any) -> None:
    overrides = {**SMALL, **SHRUNK[geometry], **more}
    seed = overrides.pop("seed", 0)
    model = describe_random_model(geometry, EMBEDDED_MODEL, routing, seed, **overrides)
    write_synthetic(model, root, PrepareOptions(tiers, group_size=32), silent)


def load(root: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_geometry_loads_and_generates(geometry: str, tmp_path: Path) -> None:
    write(tmp_path / "store", geometry, "zipf")
    model = load(tmp_path / "store")
    config = json.loads((tmp_path / "store" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "dynaexq"}
    assert config["model_type"] == GEOMETRIES[geometry]["model_type"]
    ids = torch.arange(5, 45)[None]
    with torch.inference_mode():
        states = model.model(ids).last_hidden_state
        logits = model(ids).logits
        out = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.isfinite(logits).all()
    assert logits[..., 4096:].max() < logits[..., :4096].min()  # only tokens that the tokenizer knows
    assert (states[..., 0] > 3 * states[..., 1:].std()).all()  # the constant that biases routers outlasts the layers
    assert out.shape == (1, 44)
    assert load_tokenizer(tmp_path / "store").decode(out[0])


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_geometries_have_their_published_sizes(geometry: str) -> None:
    layers, experts, billions = {
        "qwen3-30b-a3b": (48, 128, 30.5),
        "qwen3-235b-a22b": (94, 128, 235.1),
        "qwen1.5-moe-a2.7b": (24, 60, 14.3),
        "olmoe-1b-7b": (16, 64, 6.9),
        "mixtral-8x7b": (32, 8, 46.7),
        "gpt-oss-20b": (24, 32, 20.9),
        "gpt-oss-120b": (36, 128, 116.8),
        "phi-3.5-moe": (32, 16, 41.9),
        "qwen3-next-80b-a3b": (48, 512, 79.7),
        "deepseek-v2-lite": (26, 64, 15.7),
    }[geometry]
    model = describe_random_model(geometry, EMBEDDED_MODEL)
    assert (model.shape.layers, model.shape.experts) == (layers, experts)
    weights = model.shape.weights + sum(tensor.nbytes // 2 for tensor in model.tensors.values())
    assert weights / 1e9 == pytest.approx(billions, abs=0.06)


def measure(root: Path) -> np.ndarray[Any, Any]:
    """Shares of router choices [layers, experts] on random tokens."""
    model = load(root)
    runtime = runtime_of(model)
    meter = TrafficMeter(runtime.experts.shape)
    runtime.listener = meter
    ids = torch.randint(0, 4096, (4, 512), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for row in ids:
            model(row[None], use_cache=False, logits_to_keep=1)
    return meter.sums / meter.sums.sum(1, keepdims=True)


def rank_correlation(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    return float(np.corrcoef(one.argsort().argsort(), other.argsort().argsort())[0, 1])


def test_routing_is_as_asked_for(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 3}
    hotness = np.random.default_rng(1).pareto(1.5, (2, 32)) + 0.1
    found = {}
    for name, routing in (("uniform", "uniform"), ("zipf", "zipf"), ("profile", hotness)):
        write(tmp_path / name, "qwen3-30b-a3b", routing, ("int2",), **wide)
        found[name] = measure(tmp_path / name)
    assert found["uniform"].max() < 1.6 / 32
    assert found["uniform"].min() > 0.6 / 32
    shape = ExpertStore.open(tmp_path / "zipf").shape
    for name, routing in (("zipf", "zipf"), ("profile", hotness)):
        wanted = target_shares(shape, routing, 0)
        for shares, target in zip(found[name], wanted, strict=True):
            assert rank_correlation(shares, target) > 0.8
    assert (found["zipf"].max(1) > 4 / 32).all()
    top = np.sort(found["zipf"], 1)[:, -8:].sum(1)
    assert (top > 0.5).all()


def test_the_command_and_what_it_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    target = tmp_path / "store"
    command = ("synth", "olmoe-1b-7b", "-o", str(target), "--layers", "3", "--vocab", "4200", "--tiers", "int4,int2")
    made = json.loads(run(*command, "--json", "-").stdout)
    assert (made["geometry"], made["layers"], made["experts"]) == ("olmoe-1b-7b", 3, 16)
    assert made["tiers"] == ["int4", "int2"]
    assert made["seconds"] > 0
    written = sum(path.stat().st_size for path in target.rglob("*.safetensors"))
    assert written - 4096 * 8 < made["bytes_written"] <= written < directory_bytes(target)
    checked = run("inspect", str(target), "--verify")
    assert "every byte is as written" in checked.stderr
    before = contents(target)
    again = run(*command, "--json", "-")
    assert json.loads(again.stdout)["bytes_written"] == 0
    assert "already there" in " ".join(again.stderr.split())
    assert contents(target) == before
    options = ("--mode", "static", "--tier", "int4", "--raw", "--prompt", "hello", "--max-new-tokens", "5")
    assert run("generate", str(target), *options).stdout.strip()
    refuse(*command, "--seed", "1", code=5, words="is a store of another checkpoint ('synthetic olmoe-1b-7b')")
    assert contents(target) == before


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    new = tmp_path / "new"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    profile = tmp_path / "profile.json"
    TrafficProfile.of("elsewhere", "count", np.ones((2, 24)), 48, []).save(profile)
    damaged = tmp_path / "damaged.json"
    damaged.write_text(profile.read_text().replace("1.0", "2.0", 1))
    for options, code, words in (
        (("olmo", "-o", str(new)), 2, "unknown geometry 'olmo'; known geometries are qwen3-30b-a3b, "),
        (("olmoe-1b-7b", "-o", str(new), "--vocab", "4095"), 2, "4095 is below the 4096 of the tokenizer"),
        (("olmoe-1b-7b", "-o", str(new), "--tiers", "int5"), 2, "unknown tier 'int5'"),
        (("olmoe-1b-7b", "-o", str(new), "--tiers", "bf16", "--group-size", "32"), 2, "does nothing for bf16"),
        (("olmoe-1b-7b", "-o", str(new), "--group-size", "128"), 2, "group size 128 does not divide"),
        (("olmoe-1b-7b", "-o", str(new), "--routing", "pareto"), 2, "unknown routing 'pareto'"),
        (("olmoe-1b-7b", "-o", str(new), "--routing", str(profile)), 2, "24 experts a layer, this one has 16"),
        (("olmoe-1b-7b", "-o", str(new), "--routing", str(damaged)), 5, "do not match their checksum"),
        (("olmoe-1b-7b", "-o", str(foreign)), 2, "not empty (it holds notes.txt)"),
        (("olmoe-1b-7b", "-o", "x" * 300), 2, "no usable directory name"),
        (
            ("deepseek-v2-lite", "-o", str(new), "--layers", "1"),
            2,
            "first 1 layers of deepseek-v2-lite have no experts",
        ),
    ):
        refuse("synth", *options, code=code, words=words)
        assert not new.exists()
    assert contents(foreign) == {"notes.txt": b"mine"}
    monkeypatch.setattr("dynaexq.store.synthetic.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    refuse("synth", "olmoe-1b-7b", "-o", str(new), code=5, words="has 0 bytes free, the store needs")
    assert not new.exists()


def test_routers_with_corrections_or_groups_are_uniform_only(tmp_path: Path) -> None:
    limited = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    with pytest.raises(OptionError, match="--routing zipf is not supported for the routers of family 'deepseek_v2'"):
        write(tmp_path / "zipf", "deepseek-v2-lite", "zipf", **limited)
    write(tmp_path / "uniform", "deepseek-v2-lite", **limited)
    assert load(tmp_path / "uniform")


def test_zero_centred_norms_and_buffers_are_what_the_family_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    }
    options = {**SMALL, **SHRUNK["qwen1.5-moe-a2.7b"], **linear, "head_dim": 32, "model_type": "qwen3_next"}
    monkeypatch.setitem(GEOMETRIES, "next", options)
    tensors = describe_random_model("next", EMBEDDED_MODEL).tensors
    assert tensors["model.norm.weight"].fill == 0.0
    assert tensors["model.layers.0.linear_attn.norm.weight"].fill == 1.0
    deep = {**SMALL, **SHRUNK["deepseek-v2-lite"], "model_type": "deepseek_v3", "q_lora_rank": 16}
    deep |= {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    monkeypatch.setitem(GEOMETRIES, "v3", deep)
    correction = describe_random_model("v3", EMBEDDED_MODEL).tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert (correction.dtype, correction.std, correction.fill) == ("F32", 0.0, 0.0)
    with pytest.raises(OptionError, match="not supported for the routers of family 'deepseek_v3'"):
        describe_random_model("v3", EMBEDDED_MODEL, "zipf")


def test_tied_embeddings_are_written_once(tmp_path: Path) -> None:
    write(tmp_path / "store", "olmoe-1b-7b", tie_word_embeddings=True)
    model = load(tmp_path / "store")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(StoreError, match="another checkpoint"):
        write(tmp_path / "store", "olmoe-1b-7b")


def test_interrupting_it_leaves_no_partial_file(tmp_path: Path) -> None:
    target, output = tmp_path / "store", tmp_path / "output"
    options = ("--layers", "4", "--vocab", "4096", "--tiers", "int8")
    child = start_command(output, "synth", "olmoe-1b-7b", "-o", str(target), *options)
    while not (target / "model.safetensors.partial").exists():
        assert child.is_alive(), output.read_text()
        time.sleep(0.01)
    os.kill(child.ident or 0, signal.SIGINT)
    child.join()
    assert child.exitcode == 130
    assert "Traceback" not in output.read_text()
    assert not list(target.rglob("*.partial"))


def test_its_help_shows_examples() -> None:
    assert "Examples:" in run("synth", "--help").stdout


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    for geometry, options in SHRUNK.items():
        monkeypatch.setitem(GEOMETRIES, geometry, {**GEOMETRIES[geometry], **SMALL, **options})
