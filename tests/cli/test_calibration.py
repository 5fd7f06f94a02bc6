"""From texts to versions fitted to them: calibrate --inputs, prepare --calibration, and a run on nested tiers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynaexq.cli.app import app
from dynaexq.cli.calibrate import _sensitivity_windows
from dynaexq.launch import EMBEDDED_MODEL
from support.files import contents, flip_byte
from support.tiny_models import write_checkpoint

TIERS = "int2,int4,int4+4"
GROUP = ("--group-size", "64")
WIDTHS: dict[str, dict[str, int]] = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "olmoe": {"intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 64},
}


def write_model(root: Path, family: str) -> Path:
    """A tiny model with the embedded one's tokenizer."""
    write_checkpoint(root, family, vocab_size=4096, **WIDTHS[family])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED_MODEL / name, root / name)
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint `model`, a text, its `inputs`, and a `store` fitted to them."""
    base = tmp_path_factory.mktemp("calibration")
    write_model(base / "model", "qwen3_moe")
    (base / "text.txt").write_text("A text that says a little of everything, again and again. " * 40)
    run("calibrate", base / "model", "--text", base / "text.txt", "--window", "64", "--inputs", base / "inputs")
    run("prepare", base / "model", "-o", base / "store", "--tiers", TIERS, *GROUP, "--calibration", base / "inputs")
    return base


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refuse(code: int, words: str, *arguments: object) -> None:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == code, result.output
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_the_store_says_what_it_was_fitted_to(made: Path) -> None:
    described = json.loads(run("inspect", made / "store", "--json", "-"))
    assert described["calibrated_on"] == ["text.txt"]
    assert described["quantizer"].startswith("calibrated-")
    assert described["tiers"]["int4+4"]["bits_per_weight"] == 4
    assert len(described["calibration"]["sensitivity"]) == 2
    predicted = {name: tier["predicted_kl"] for name, tier in described["tiers"].items()}
    assert predicted["int2"] > 4 * predicted["int4"] > 16 * predicted["int4+4"] > 0
    assert described["super_experts"] == []


def test_people_are_told_what_tiers_lose_where_that_is_known(made: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["inspect", str(made / "store")]).stderr
    assert "predicted KL" in said and "super experts: none" in said
    assert len(said.partition("relative to their mean: ")[2].splitlines()[0].split()) == 2
    again = ["prepare", str(made / "model"), "-o", str(made / "store"), "--tiers", "int2", *GROUP]
    said = CliRunner().invoke(app, [*again, "--calibration", str(made / "inputs")]).stderr
    assert "predicted KL" in said and "nats per token" in said
    run("prepare", made / "model", "-o", tmp_path / "plain", "--tiers", "int2", *GROUP)
    assert "KL" not in CliRunner().invoke(app, ["inspect", str(tmp_path / "plain")]).stderr
    assert "predicted_kl" not in run("inspect", tmp_path / "plain", "--json", "-")


def test_sensitivity_is_measured_all_over_every_text() -> None:
    long, short = list(range(10_000)), list(range(70))
    windows = _sensitivity_windows([long, short], 512)
    assert [each[0] for each in windows] == [0, 2500, 5000, 7500, 0]
    assert [len(each) for each in windows] == [256, 256, 256, 256, 70]
    assert _sensitivity_windows([short], 32) == [short[:32], short[32:64], short[64:]]
    many = _sensitivity_windows([long] * 500, 512)
    assert len(many) == 500 and sum(map(len, many)) <= 2048


def test_the_same_again_changes_nothing_and_damage_is_restored(made: Path) -> None:
    finished = contents(made / "store")
    command = ("prepare", made / "model", "-o", made / "store", "--tiers", TIERS, *GROUP)
    run(*command, "--calibration", made / "inputs")
    flip_byte(made / "store" / "experts" / "layer-0001.int4.safetensors", -1)
    run(*command, "--calibration", made / "inputs")
    assert contents(made / "store") == finished
    refuse(2, "was prepared with --calibration by the inputs of text.txt (calibrated-", *command)


def test_experts_move_between_a_version_and_what_is_nested_in_it(made: Path) -> None:
    tiers = ("--mode", "dynaexq", "--high", "int4+4", "--low", "int4", "--expert-memory", "200K")
    said = json.loads(
        run("generate", made / "store", "--prompt", "A text", "--max-new-tokens", "40", *tiers, "--json", "-")
    )
    assert said["high"] == "int4+4" and said["experts_high"] > 0
    assert said["waits"] == said["failed"] == 0
    generate = ("generate", made / "store", "--prompt", "x")
    refuse(2, "refines int4 versions while a model runs", *generate, "--mode", "static", "--tier", "int4+4")
    spare = ("--expert-memory", "200K", "--tune", "spare=2")
    refuse(2, "leave out spare", *generate, "--mode", "dynaexq", "--high", "int4+4", "--low", "int4", *spare)
    refuse(2, "goes with the low tier int4", *generate, "--mode", "dynaexq", "--high", "int4+4", "--low", "int2")


@pytest.mark.parametrize("mode", ["auto", "full", "uniform"])
def test_tiers_that_refine_others_are_no_choice_of_their_own(made: Path, mode: str) -> None:
    options = ("--prompt", "A text", "--max-new-tokens", "4", "--mode", mode, "--json", "-")
    assert json.loads(run("generate", made / "store", *options))["tier"] == "int4"


def test_refusals(made: Path, tmp_path: Path) -> None:
    prepare = ("prepare", made / "model", "-o", tmp_path / "new", *GROUP)
    calibrated = ("--calibration", made / "inputs")
    refuse(2, "leave out --quantizer", *prepare, "--tiers", "int2", *calibrated, "--quantizer", "als")
    refuse(2, "--calibration does nothing for int8, bf16", *prepare, "--tiers", "int8,bf16", *calibrated)
    for wrong in (tmp_path / "none", made / "inputs" / "inputs.json"):
        refuse(5, "no directory of a finished calibration", *prepare, "--tiers", "int2", "--calibration", wrong)
    damaged = Path(shutil.copytree(made / "inputs", tmp_path / "damaged"))
    flip_byte(damaged / "inputs-0001.safetensors", -1)
    refuse(5, "inputs-0001.safetensors is damaged", *prepare, "--tiers", "int2", "--calibration", damaged)
    write_model(tmp_path / "other", "olmoe")
    refuse(
        5,
        "is the calibration of another model",
        "prepare",
        tmp_path / "other",
        "-o",
        tmp_path / "new",
        "--tiers",
        "int2",
        *GROUP,
        *calibrated,
    )
    text = ("calibrate", made / "model", "--text", made / "text.txt")
    refuse(2, "holds a calibration; --force replaces it", *text, "--inputs", made / "inputs")
    refuse(2, "give an --output, --inputs or both", *text)
    refuse(2, "is in, the directory of --inputs", *text, "--inputs", tmp_path / "x", "-o", tmp_path / "x")
    assert not (tmp_path / "new").exists()


def test_biases_of_experts_are_part_of_what_is_fitted(tmp_path: Path) -> None:
    """gpt_oss: biases, a clamped gate, gate and up alternating."""
    model, text = write_model(tmp_path / "model", "gpt_oss"), tmp_path / "text.txt"
    text.write_text("A text that says a little of everything, again and again. " * 10)
    run("calibrate", model, "--text", text, "--window", "64", "--inputs", tmp_path / "inputs")
    run("prepare", model, "-o", tmp_path / "store", "--tiers", "int2", *GROUP, "--calibration", tmp_path / "inputs")
    run("inspect", tmp_path / "store", "--verify")
