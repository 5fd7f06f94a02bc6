"""The commands in this process: options, JSON contract, exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dynaexq.cli.app import app
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.store.layer_file import layer_path
from support.files import contents, flip_byte

REPORT = {
    "mode", "budget_bytes", "device_bytes_peak", "rss_peak_bytes", "expert_bytes", "bits_per_expert_weight", "waits",
    "wait_seconds", "promotions", "demotions", "evictions", "deferred", "failed", "bytes_moved", "hot_share_high",
    "tokens_per_second",
}  # fmt: skip


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result


def refuse(*arguments: str, code: int, words: str) -> None:
    result = run(*arguments, code=code)
    assert result.stdout == ""
    message = " ".join(result.stderr.split())
    assert message.startswith("error: ")
    assert words in message, message


@pytest.fixture(scope="module")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the first use of the demo filled. Copy it before changing it."""
    cache = tmp_path_factory.mktemp("demo") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYNAEXQ_CACHE", str(cache))
        first = json.loads(run("generate", "--demo", "--json", "-").stdout)
    assert (first["mode"], first["tier"], first["high"]) == ("dynaexq", "int4", "int8")
    assert first["expert_bytes"] <= 16 << 20
    assert first["device_bytes_peak"] <= first["budget_bytes"]
    assert first["waits"] == first["failed"] == 0
    assert 0 < first["hot_share_high"] < 1
    assert first["experts_high"] > 100
    return cache


def test_prepare_generate_and_evaluate_keep_the_json_contract(store: Path, tmp_path: Path) -> None:
    answer = json.loads(run("generate", str(store), "--prompt", "copy: a b c", "--json", "-").stdout)
    assert REPORT | {"text", "ttft_seconds"} <= set(answer)
    assert answer["text"] == "a b c"
    assert answer["mode"] == "full"
    assert answer["hot_share_high"] == 1.0
    assert answer["waits"] == answer["bytes_moved"] == answer["failed"] == 0
    assert answer["expert_bytes"] == 192 * 196608
    assert answer["device_bytes_peak"] <= answer["budget_bytes"]
    assert answer["device_bytes_peak"] == sum(answer["parts"].values())

    target = tmp_path / "out.json"
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    result = run(
        "evaluate", str(store), "--text", str(text), "--mode", "static", "--tier", "int2", "--json", str(target)
    )
    scores = json.loads(target.read_text())
    assert REPORT | {"perplexity", "tokens", "text_file"} <= set(scores)
    assert scores["mode"] == "static"
    assert scores["hot_share_high"] == 0.0
    assert scores["expert_bytes"] == 192 * 32768
    assert scores["bits_per_expert_weight"] == pytest.approx(32768 * 8 / 98304)
    assert f"perplexity {scores['perplexity']:.4f} over {scores['tokens']} tokens" in result.stdout
    better = json.loads(run("evaluate", str(store), "--text", str(text), "--mode", "full", "--json", "-").stdout)
    assert better["perplexity"] != scores["perplexity"]


def test_first_use_prepares_into_the_cache_and_reuses_it(demo_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path: path.stat().st_mtime_ns for path in demo_cache.rglob("layer-*")}
    assert len(files) == 12
    monkeypatch.setenv("DYNAEXQ_CACHE", str(demo_cache))
    second = json.loads(run("generate", "--demo", "--json", "-").stdout)
    assert second["text"].startswith("There are 7 ")
    assert {path: path.stat().st_mtime_ns for path in demo_cache.rglob("layer-*")} == files


def test_a_damaged_cache_is_restored_from_the_checkpoint(
    demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = shutil.copytree(demo_cache, tmp_path / "copy")
    monkeypatch.setenv("DYNAEXQ_CACHE", str(cache))
    options = ("generate", "--demo", "--mode", "static", "--tier", "int4")
    first = run(*options)
    (path,) = cache.rglob("layer-0003.int4.safetensors")
    whole = path.read_bytes()
    flip_byte(path, -20)
    second = run(*options)
    assert second.stdout == first.stdout
    assert "restoring it from the checkpoint" in " ".join(second.stderr.split())
    assert path.read_bytes() == whole


def test_precision_follows_traffic_within_the_budget(store: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n\n\n" * 60)
    common = ("evaluate", str(store), "--text", str(text), "--window", "64", "--stride", "32", "--json", "-")
    scores = json.loads(run(*common, "--mode", "dynaexq", "--expert-memory", "16M").stdout)
    assert (scores["mode"], scores["tier"], scores["high"]) == ("dynaexq", "int2", "bf16")
    assert scores["expert_bytes"] <= 16 << 20
    assert scores["promotions"] == scores["demotions"] > 0
    assert scores["evictions"] == scores["promotions"] + scores["demotions"]
    assert scores["waits"] == scores["failed"] == 0
    assert scores["hot_share_high"] > scores["experts_high"] / 192
    again = json.loads(run(*common, "--mode", "dynaexq", "--expert-memory", "16M").stdout)
    assert again["perplexity"] == scores["perplexity"]  # replay is reproducible
    refuse(*common, "--mode", "dynaexq", "--expert-memory", "6300000", code=6, words="but not one more at bf16")
    refuse(*common, "--mode", "dynaexq", code=2, words="every expert fits at bf16, the highest tier")


def test_prompts_from_a_file_and_from_stdin(store: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("copy: x y z")
    assert run("generate", str(store), "--prompt-file", str(tmp_path / "p.txt")).stdout == "x y z\n"
    result = CliRunner().invoke(app, ["generate", str(store), "--prompt", "-"], input="copy: x y z")
    assert result.stdout == "x y z\n"


def test_sampling_follows_the_seed(store: Path) -> None:
    def sample(seed: int) -> str:
        options = ("--raw", "--prompt", "The", "--temperature", "1.5", "--max-new-tokens", "12", "--seed", str(seed))
        return str(run("generate", str(store), *options).stdout)

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in (1, 2, 3)}) > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate",), "give a MODEL, or --demo"),
        (("generate", "STORE", "--demo"), "either a MODEL or --demo"),
        (("generate", "STORE"), "give a --prompt"),
        (("generate", "STORE", "--prompt", ""), "the prompt is empty"),
        (("generate", "STORE", "--prompt", "x", "--prompt-file", "y"), "not both"),
        (("generate", "STORE", "--prompt-file", "/no/such"), "cannot read /no/such"),
        (("generate", "STORE", "--prompt", "x", "--mode", "fast"), "unknown mode 'fast'"),
        (("generate", "STORE", "--prompt", "x", "--tier", "int2"), "goes with --mode static"),
        (("generate", "STORE", "--prompt", "x", "--mode", "static"), "--mode static needs --tier"),
        (("generate", "STORE", "--prompt", "x", "--mode", "static", "--tier", "int5"), "unknown tier 'int5'"),
        (("generate", "STORE", "--prompt", "x", "--memory", "lots"), "--memory 'lots' is no size"),
        (("generate", "STORE", "--prompt", "x", "--dtype", "fp8"), "unknown dtype 'fp8'"),
        (("generate", "STORE", "--prompt", "x", "--high", "bf16"), "give --high and --low together"),
        (("generate", "STORE", "--prompt", "x", "--high", "bf16", "--low", "int2"), "go with --mode dynaexq"),
        (("generate", "STORE", "--prompt", "x", "--seed", "3"), "--seed would do nothing at temperature 0"),
        (("generate", "STORE", "--prompt", "x", "--max-new-tokens", "1024"), "passes the model's context of 1024"),
        (("generate", "STORE", "--prompt", "x", "--json", "/no/such/x.json"), "existing, writable directory"),
        (("generate", "STORE", "--prompt", "x", "--json", "STORE/dynaexq.json"), "is a model's directory"),
        (("inspect", "STORE", "--json", "STORE/experts/x.json"), "is a model's directory"),
        (("generate", "STORE", "--prompt", "x", "--memory", "1G", "--expert-memory", "2G"), "it would limit nothing"),
        (("prepare", "CHECKPOINT", "-o", "new", "--tiers", "bf16", "--quantizer", "rtn"), "do nothing for bf16 alone"),
        (("prepare", "CHECKPOINT", "-o", "x" * 300), "no usable directory name"),
        (("evaluate", "STORE"), "give a --text"),
        (("evaluate", "STORE", "--text", "/no/such"), "cannot read /no/such"),
        (("evaluate", "STORE", "--text", "TEXT", "--window", "2048"), "--window 2048 is above the model's context"),
        (("evaluate", "STORE", "--text", "TEXT", "--window", "8", "--stride", "8"), "smaller stride"),
        (("prepare", "STORE", "-o", "new"), "is a store already"),
    ],
)
def test_options_that_make_no_sense_stop_the_start(
    store: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / "text.txt").write_text("some text to read")
    places = {
        "STORE": str(store),
        "CHECKPOINT": str(EMBEDDED_MODEL),
        "TEXT": str(tmp_path / "text.txt"),
        "new": str(tmp_path / "new"),
    }
    before = contents(store)
    head = (argument.replace("STORE/", f"{store}/") for argument in arguments)
    refuse(*(places.get(argument, argument) for argument in head), code=2, words=words)
    assert contents(store) == before
    assert not (tmp_path / "new").exists()


def test_each_kind_of_failure_has_its_exit_code(store: Path, tmp_path: Path) -> None:
    before = contents(store)
    refuse("generate", "/no/such/model", "--prompt", "x", code=3, words="is not a directory, nor a hub id")
    refuse("generate", str(store), "--prompt", "x", "--memory", "100M", code=6, words="is below the floor")
    refuse("generate", str(store), "--prompt", "x", "--expert-memory", "1M", code=6, words="all experts at int2")
    refuse(
        "generate", str(store), "--prompt", "x", "--mode", "static", "--tier", "int8", code=5, words="has no tier int8"
    )
    refuse("inspect", str(tmp_path), code=5, words="is not a store")
    assert contents(store) == before
    assert not (tmp_path / "cache").exists()


def test_inspect_shows_and_verifies(store: Path) -> None:
    shown = json.loads(run("inspect", str(store), "--verify", "--json", "-").stdout)
    assert shown["damaged"] == []
    assert set(shown["tiers"]) == {"int2", "bf16"}
    assert len(shown["tiers"]["int2"]["errors"]) == 6
    assert shown["tiers"]["bf16"]["error_max"] == 0.0
    path = layer_path(store, 4, "int2")
    flip_byte(path, -40_000)
    try:
        refuse_after_table = run("inspect", str(store), "--verify", code=5)
        assert "layer 4 expert 30 at int2" in " ".join(refuse_after_table.stderr.split())
        refuse(
            "generate", str(store), "--prompt", "x", "--mode", "static", "--tier", "int2", code=5, words="is damaged"
        )
    finally:
        flip_byte(path, -40_000)


def test_stores_that_lost_a_file(store: Path, tmp_path: Path) -> None:
    for name, words in (
        ("model.safetensors", "is missing or cut short"),
        ("tokenizer.json", "no usable tokenizer (tokenizer.json is missing)"),
        ("dynaexq.json", "is a store whose dynaexq.json is missing"),
    ):
        copy = tmp_path / name
        shutil.copytree(store, copy)
        (copy / name).unlink()
        result = CliRunner().invoke(app, ["generate", str(copy), "--prompt", "x"])
        assert result.exit_code in (3, 5)
        assert words in " ".join(result.stderr.split())
        if name == "tokenizer.json":
            checked = run("inspect", str(copy), "--verify", code=5)
            assert "tokenizer.json (missing or changed)" in " ".join(checked.stderr.split())


def test_a_chat_template_that_fails(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    refuse("generate", str(tmp_path / "copy"), "--prompt", "x", code=3, words="chat template fails")
    run("generate", str(tmp_path / "copy"), "--raw", "--prompt", "x", "--max-new-tokens", "2")


def test_what_nobody_foresaw_is_one_line_too(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaexq.cli.inspect.ExpertStore.open", lambda _: 1 / 0)
    refuse("inspect", str(store), code=1, words="unexpected ZeroDivisionError: division by zero")


def test_help_shows_examples_and_version_is_printed() -> None:
    for command in ("prepare", "inspect", "generate", "evaluate"):
        assert "Examples:" in run(command, "--help").stdout
    assert run("--version").stdout.startswith("dynaexq ")
