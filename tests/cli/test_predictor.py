"""`dynaexq predictor`: how well routing can be foreseen, trained, and served with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.test_cli import refuse, run


@pytest.fixture(scope="session")
def hidden(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hidden") / "run.parquet"
    options = ("--prompt", "There are many boxes with coins. " * 60, "--max-new-tokens", "40")
    run("generate", str(store), "--mode", "full", *options, "--record", str(path), "--record-hidden")
    return path


def test_a_predictor_is_trained_beside_the_store_and_found_there(store: Path, hidden: Path, tmp_path: Path) -> None:
    mine = tmp_path / "store"
    shutil.copytree(store, mine)
    sizes = ("--width", "8", "--reach", "2", "--window", "16", "--epochs", "3")
    result = json.loads(run("predictor", "train", str(mine), "--traces", str(hidden), *sizes, "--json", "-").stdout)
    file = mine / "predictor.safetensors"
    assert result["output"] == str(file) and file.is_file()
    assert len(result["trained"]["recall"]) == 2 and set(result["recall"]) == {"static", "average", "pregate", "linear"}
    refuse("predictor", "train", str(mine), "--traces", str(hidden), *sizes, code=2, words="exists")
    shown = run("predictor", "report", str(mine), "--traces", str(hidden), "--predictor", str(file)).stdout
    assert "layers ahead" in shown and "foresees most" in shown and "held out" in shown
    tuned = ("-o", str(tmp_path / "tuned.safetensors"), "--from", str(file))
    run("predictor", "train", str(mine), "--traces", str(hidden), *sizes, *tuned)
    flow = ("--mode", "expertflow", "--tier", "int2", "--expert-memory", "1M", "--prompt", "a", "--max-new-tokens", "4")
    found = json.loads(run("generate", str(mine), *flow, "--json", "-").stdout)
    assert found["cache"]["loads_ahead"] >= 0
    file.write_bytes(file.read_bytes()[:-5])
    refuse("generate", str(mine), *flow, code=5, words=str(file))


def test_what_cannot_be_learned_from_is_refused(store: Path, recorded: Path, hidden: Path, tmp_path: Path) -> None:
    refuse("predictor", "train", str(store), "-o", str(tmp_path / "p"), code=2, words="at least one --traces")
    few = ("--traces", str(hidden), "--max-tokens", "50")
    refuse("predictor", "report", str(store), *few, code=2, words="too few")
    refuse("predictor", "report", str(store), "--traces", str(hidden), "--reach", "7", code=2, words="--reach 7")
    refuse("predictor", "report", str(store), "--traces", str(tmp_path / "none.parquet"), code=5, words="not there")
    refuse(
        "predictor",
        "train",
        str(store),
        "--traces",
        str(hidden),
        "-o",
        str(hidden),
        "--force",
        code=2,
        words="same file",
    )
    assert not (store / "predictor.safetensors").exists()
