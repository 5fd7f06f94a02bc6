"""The planner: byte counts by hand, the engine's own plan, and what to change when it does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from cli.test_cli import refuse, run
from dynaexq.core import ExpertShape, ModelShape, OptionError, SideFileError
from dynaexq.engine import EngineOptions
from dynaexq.formats import VersionLayout, tier_format
from dynaexq.launch import EMBEDDED_MODEL, Opened
from dynaexq.launch_options import LaunchOptions
from dynaexq.llm import LLM, size_workload
from dynaexq.plan.memory import ModelProfile, Workload, expert_bytes, fixed_parts
from dynaexq.plan.speed import Machine, expect_speed, read_probe
from dynaexq.planning import Geometry, count_parameters, look_ahead, zipf_traffic

GIB = 1 << 30
WORK = Workload(tokens=516, context=4096, sequences=4, logits=5, element_bytes=4, kv_cache=True)


@pytest.mark.parametrize(
    ("shape", "gigabytes"),
    [
        (ModelShape(48, 128, ExpertShape(2048, 768)), (57.98, 29.44, 15.40, 9.06)),
        (ModelShape(48, 512, ExpertShape(2048, 512)), (154.6, 78.5, 41.1, 24.2)),
    ],
)
def test_pools_by_hand(shape: ModelShape, gigabytes: tuple[float, ...]) -> None:
    """GB are 1e9 bytes. A group has a 16-bit scale, and below int8 a 16-bit offset."""
    for name, expected in zip(("bf16", "int8 128", "int4 128", "int2 64"), gigabytes, strict=True):
        tier, _, group = name.partition(" ")
        layout = VersionLayout.of(tier_format(tier, int(group or 64)), shape.expert)
        bits = {"bf16": 16, "int8": 8 + 16 / 128, "int4": 4 + 32 / 128, "int2": 2 + 32 / 64}[tier]
        assert layout.payload_bytes == shape.expert.weights * bits / 8
        assert layout.payload_bytes * shape.layers * shape.experts / 1e9 == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-next-80b-a3b", 79.7, 3.9),  # the multi-token prediction head is not loaded
        ("phi-3.5-moe", 41.9, 6.6),
        ("mixtral-8x7b", 46.7, 12.9),
        ("deepseek-v2-lite", 15.7, 2.7),
        ("gpt-oss-120b", 116.8, 5.7),
    ],
)
def test_parameters_are_the_published_ones(name: str, total: float, active: float) -> None:
    """Active ones with both embeddings; some publishers leave the table of tokens out."""
    found = count_parameters(Geometry(name))
    assert found.total / 1e9 == pytest.approx(total, rel=0.015) and found.active / 1e9 == pytest.approx(
        active, rel=0.02
    )
    dense = found.embeddings + found.shared_experts + found.routers + found.other
    assert found.total == found.experts + dense and found.routers > 0


@pytest.mark.parametrize(
    ("name", "layers", "by_token"),
    [
        ("qwen3-30b-a3b", 48, 2 * 4 * 128),
        ("gpt-oss-120b", 36, 2 * 8 * 64),  # layers with a sliding window keep the whole context, too
        ("deepseek-v2-lite", 27, 16 * (128 + 64 + 128)),  # Transformers keeps keys and values, not the latent vector
        ("qwen3-next-80b-a3b", 12, 2 * 2 * 256),  # one layer in four; the others have a state
    ],
)
def test_keys_and_values_by_hand(name: str, layers: int, by_token: int) -> None:
    profile = Geometry(name).skeleton.profile
    assert profile.kv_width == layers * by_token
    work = Workload(1, 1000, 3, 1, 2, True, kv_element_bytes=2)
    short, long = (fixed_parts(profile, replace(work, context=each), 0)["KV cache"] for each in (1000, 2000))
    numbers = 3 * 1000 * 2 * layers * by_token + 1000 * 2 * by_token  # and copies of one layer's, of one in four
    if name == "gpt-oss-120b":  # attends eagerly, to keys and values repeated for all 64 heads of 64
        numbers += 1000 * 2 * 2 * 64 * 64
    assert long - short == numbers and (short > numbers) is (profile.state_elements > 0)


def test_the_worked_example_of_expertflow_adds_up() -> None:
    """8 experts of 7 GB: 3 resident and 1 loading, KV 4, activations 2, framework 1.5: 35.5 GB."""
    parts = {"resident experts": 3 * 7.0, "one load": 7.0, "KV cache": 4.0, "activations": 2.0, "framework": 1.5}
    assert sum(parts.values()) == 35.5
    kv = fixed_parts(profile_of(), Workload(1, 4096, 4, 1, 4, True), 0)["KV cache"]
    assert kv == 4096 * (4 * 4 * 1024 + 4 * 1024)


def profile_of(**changes: Any) -> ModelProfile:
    values: dict[str, Any] = {
        "shape": ModelShape(2, 8, ExpertShape(64, 32)), "dense_parameters": 1000, "unpackable_parameters": 0,
        "matrices": ((100, 8),), "embeddings": ((100, 8),), "hidden": 64, "vocabulary": 100, "max_context": 8192,
        "kv_width": 1024, "kv_vectors": 16, "kv_layers": 1, "state_elements": 0, "attention_width": 64,
        "dense_width": 64, "eager_attention_heads": 0,
    }  # fmt: skip
    return ModelProfile(**{**values, **changes})


def test_the_plan_is_the_engines(embedded_store: Path) -> None:
    for options in (
        LaunchOptions(expert_memory=12 << 20),
        LaunchOptions(mode="static", tier="int4"),
        LaunchOptions(memory=1500 << 20),
    ):
        opened = Opened(str(embedded_store))
        work = size_workload(1024, 2, 256, None, EngineOptions(), "float32")
        outlook = look_ahead(opened, options, work, None)
        with LLM(opened, slots=2, context=256, options=options) as llm:
            made, planned = llm.launch.plan, outlook.plan
            assert planned is not None
            assert (planned.mode, planned.tier, planned.versions) == (made.mode, made.tier, made.versions)
            assert {**made.fixed, "process": 0} == {**planned.fixed, "process": 0}


def test_regimes() -> None:
    opened = Geometry("qwen3-30b-a3b")
    for gigabytes, regime in ((80, "full"), (16, "dynaexq"), (8, "offload")):
        outlook = look_ahead(
            opened, LaunchOptions(memory=gigabytes * GIB), WORK, zipf_traffic(opened.skeleton.profile.shape, 1)
        )
        assert outlook.regime == regime and (outlook.plan is None) is (regime == "offload")
        if regime == "dynaexq":
            assert outlook.plan is not None and outlook.plan.total <= outlook.limit == 16 * GIB
            assert outlook.raised is not None and 0.5 < outlook.raised < 1 and outlook.slack is not None
            sizes = {tier: expert_bytes(opened.skeleton.profile.shape, tier, 64) for tier in outlook.tiers}
            assert outlook.tiers == sizes and "worth it" in outlook.advice


def test_the_smallest_change_of_each_kind_is_found() -> None:
    opened = Geometry("qwen3-30b-a3b")
    outlook = look_ahead(opened, LaunchOptions(memory=12 * GIB), Workload(520, 16384, 8, 9, 4, True), None)
    options = {change.option for change in outlook.changes}
    assert outlook.plan is None and options and all(change.plan.total <= 12 * GIB for change in outlook.changes)
    assert all("--" in option for option in options) and "below the floor" in (outlook.reason or "")
    forced = look_ahead(opened, LaunchOptions(mode="static", tier="bf16", memory=24 * GIB), WORK, None)
    assert "--mode auto" in {change.option for change in forced.changes}


def test_speed_by_hand() -> None:
    profile, work = profile_of(), Workload(1, 16, 1, 1, 4, True, dense="full")
    machine = Machine(read=1e6, link=1e5, reached={"int2": 0.5, "int8": 0.8})
    speed = expect_speed(profile, work, {"int4": 2, "int8": 1}, {"int4": 1000, "int8": 3000}, machine)
    dense = 4 * (1000 - 800)
    assert speed.bytes_per_token == dense + 2000 + 3000 and speed.high == pytest.approx(1e6 / (dense + 5000))
    assert speed.low == pytest.approx(1e6 / (dense / 0.8 + 2000 / 0.5 + 3000 / 0.8))


def test_probes_are_checked(tmp_path: Path) -> None:
    probe = tmp_path / "probe.json"
    for text in ("", "[]", '{"memory":{"read":0},"link":{"bytes_per_second":1}}', '{"memory":{"read":1}}'):
        probe.write_text(text)
        with pytest.raises(SideFileError, match=r"probe\.json is no result of `dynaexq probe --json`"):
            read_probe(probe)
    probe.write_text('{"memory":{"read":2e10},"link":{"bytes_per_second":1e9}}')
    assert read_probe(probe) == Machine(2e10, 1e9, {}) and read_probe(probe).share("int4") == 1


def test_of_a_model_on_the_hub_no_weights_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = Opened(str(EMBEDDED_MODEL)).source.checkpoint.tensors  # type: ignore[union-attr]
    shapes = {name: SimpleNamespace(shape=list(entry.shape)) for name, entry in tensors.items()}
    shapes["mtp.layers.0.weight"] = SimpleNamespace(shape=[1000, 77])
    files = SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=shapes)})
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _, name: str(EMBEDDED_MODEL / name))
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda _: files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("weights were fetched"))
    far = json.loads(run("plan", "org/model", "--expert-memory", "12M", "--json", "-").stdout)
    near = json.loads(run("plan", str(EMBEDDED_MODEL), "--expert-memory", "12M", "--json", "-").stdout)
    assert far["parameters"].pop("not_loaded") == 77_000 and near["parameters"].pop("not_loaded") == 0
    assert far["parameters"] == near["parameters"] and far["plan"]["slots"] == near["plan"]["slots"]

    def fail(*_: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    refuse("plan", "org/model", code=3, words="cannot be fetched from the hub: no network")


def test_the_command(tmp_path: Path) -> None:
    probe = tmp_path / "probe.json"
    probe.write_text(
        '{"memory":{"read":2e10},"link":{"bytes_per_second":1e9},"kernels":{"tiers":{"int4":{"share_of_read":0.8}}}}'
    )
    result = json.loads(
        run("plan", "qwen3-30b-a3b", "--memory", "16G", "--zipf", "1", "--probe", str(probe), "--json", "-").stdout
    )
    assert result["plan"]["mode"] == "dynaexq" and sum(result["plan"]["slots_by_layer"]) == sum(
        result["plan"]["slots"].values()
    )
    assert 5 < result["speed"]["low"] <= result["speed"]["high"] < 20 and result["parameters"]["total"] > 30e9
    shown = run("plan", str(EMBEDDED_MODEL), "--expert-memory", "12M", "--slots", "1").stdout
    assert "mode dynaexq" in shown and "speed: not known" in shown and "dense weights" in shown
    pytest.importorskip("matplotlib")
    run("plan", "olmoe-1b-7b", "--memory", "12G", "--plot", str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").stat().st_size > 5000


def test_refusals(tmp_path: Path) -> None:
    short = run("plan", "gpt-oss-120b", "--memory", "12G", code=6)
    assert "below the floor" in short.stderr and "would, with all experts at the lowest tier" in short.stdout
    assert "with --mode expertflow --tier int2 it would: expertflow, experts at int2," in short.stdout
    mine = str(tmp_path / "c.json")
    Path(mine).write_text('{"mode": "auto"}')
    for arguments, code, words in (
        (("qwen3-30b-a3b", "--memory", "0"), 2, "is no size"),
        (("qwen3-30b-a3b", "--memory", "-5G"), 2, "is no size"),
        (("qwen3-30b-a3b", "--memory", "12X"), 2, "is no size"),
        (("qwen9",), 3, "not a directory"),
        (("qwen3-30b-a3b", "--zipf", "1", "--profile", "x"), 2, "give one"),
        (("qwen3-30b-a3b", "--context", "999999"), 2, "context 999999"),
        (("qwen3-30b-a3b", "--mode", "static", "--tier", "int9"), 2, "unknown tier"),
        (("qwen3-30b-a3b", "--trace", str(tmp_path / "no.parquet")), 5, "not there"),
        (("qwen3-30b-a3b", "--plot", str(tmp_path / "no" / "x.png")), 2, "--plot"),
        (("qwen3-30b-a3b", "--plot", str(tmp_path / "x")), 2, "name a file that ends in .png or .svg"),
        (("qwen3-30b-a3b", "--config", mine, "--json", mine), 2, "the same file is given for another option"),
    ):
        refuse("plan", *arguments, code=code, words=words)


def test_a_profile_of_another_model_is_refused(tmp_path: Path, embedded_store: Path) -> None:
    profile = tmp_path / "profile.json"
    run("calibrate", "--demo", "--text", "data/english_heldout.txt", "--max-tokens", "600", "-o", str(profile))
    assert "above the lowest tier" in run("plan", "--demo", "--profile", str(profile)).stdout
    refuse("plan", "qwen3-30b-a3b", "--profile", str(profile), code=2, words="of another model: 6 layers of 32 experts")
    assert np.isfinite(zipf_traffic(ModelShape(2, 4, ExpertShape(64, 32)), 0)).all()
    with pytest.raises(OptionError, match="unknown geometry"):
        Geometry("qwen9")
