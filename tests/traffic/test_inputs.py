"""What experts were given, kept on disk: it comes back as it was, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaexq.core import ExpertShape, ModelShape, OptionError, SideFileError
from dynaexq.traffic.inputs import INPUTS_NAME, ExpertInputs, InputsWriter, check_inputs_target
from support.files import flip_byte

SHAPE = ModelShape(2, 5, ExpertShape(64, 32))
PASSES = (3, 4, 1)
SENSITIVITY = [2.5e-5, 0.0]


def given(layer: int, number: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * layer + number)
    ids = torch.randint(0, SHAPE.experts, (tokens, 2), generator=generator)
    return torch.randn(tokens, 64, generator=generator), ids, torch.rand(tokens, 2, generator=generator)


def write(root: Path, finish: bool = True) -> None:
    writer = InputsWriter(root, "model", SHAPE, sum(PASSES))
    for number, tokens in enumerate(PASSES):
        for layer in range(SHAPE.layers):
            writer.add(layer, *given(layer, number, tokens))
    if finish:
        writer.finish("int8", ["a.txt"], SENSITIVITY)
    else:
        writer.close()


def test_inputs_come_back_layer_by_layer(tmp_path: Path) -> None:
    write(tmp_path / "inputs")
    inputs = ExpertInputs.open(tmp_path / "inputs", "model", SHAPE)
    assert inputs.texts == ("a.txt",)
    assert inputs.sensitivity == tuple(SENSITIVITY)
    for layer in range(SHAPE.layers):
        expected = [torch.cat(each) for each in zip(*(given(layer, n, t) for n, t in enumerate(PASSES)), strict=True)]
        found = inputs.layer(layer)
        assert torch.equal(found.hidden, expected[0].to(torch.bfloat16))
        assert torch.equal(found.ids, expected[1].to(torch.int32))
        assert torch.equal(found.weights, expected[2])


def test_identity_is_that_of_the_content(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "two")
    one, two = (ExpertInputs.open(tmp_path / name, "model", SHAPE).identity for name in ("one", "two"))
    assert one == two


def test_what_is_no_whole_calibration_of_this_model_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "inputs"
    with pytest.raises(SideFileError, match="no directory of a finished calibration"):
        ExpertInputs.open(root, "model", SHAPE)
    write(root, finish=False)
    with pytest.raises(SideFileError, match="no directory of a finished calibration"):
        ExpertInputs.open(root, "model", SHAPE)
    write(root)
    with pytest.raises(SideFileError, match="of another model"):
        ExpertInputs.open(root, "other", SHAPE)
    with pytest.raises(SideFileError, match="of another model"):
        ExpertInputs.open(root, "model", ModelShape(2, 6, SHAPE.expert))
    flip_byte(root / "inputs-0001.safetensors", -1)
    inputs = ExpertInputs.open(root, "model", SHAPE)
    inputs.layer(0)
    with pytest.raises(SideFileError, match=r"inputs-0001.safetensors is damaged"):
        inputs.layer(1)
    (root / "inputs-0000.safetensors").unlink()
    with pytest.raises(SideFileError, match=r"cannot read .*inputs-0000"):
        inputs.layer(0)
    (root / INPUTS_NAME).write_text("{}")
    with pytest.raises(SideFileError, match=r"inputs.json is damaged"):
        ExpertInputs.open(root, "model", SHAPE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expert_inputs": 1}, "of version 1, this program reads 2; calibrate again"),
        ({"sensitivity": [1e-5, -1e-9]}, "inputs.json is damaged"),
        ({"sensitivity": [1e-5, "NaN"]}, "inputs.json is damaged"),
        ({"sensitivity": [1e-5]}, "of another model"),
    ],
)
def test_heads_that_say_something_else_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write(tmp_path)
    head = json.loads((tmp_path / INPUTS_NAME).read_text())
    (tmp_path / INPUTS_NAME).write_text(json.dumps({**head, **change}))
    with pytest.raises(SideFileError, match=words):
        ExpertInputs.open(tmp_path, "model", SHAPE)


def test_an_older_head_is_told_by_its_version_not_by_what_it_lacks(tmp_path: Path) -> None:
    write(tmp_path)
    head = json.loads((tmp_path / INPUTS_NAME).read_text())
    del head["sensitivity"]
    (tmp_path / INPUTS_NAME).write_text(json.dumps({**head, "expert_inputs": 1}))
    with pytest.raises(SideFileError, match="calibrate again"):
        ExpertInputs.open(tmp_path, "model", SHAPE)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    writer = InputsWriter(tmp_path / "inputs", "model", SHAPE, 3)
    for layer in range(SHAPE.layers):
        hidden, ids, weights = given(layer, 0, 3)
        hidden[1, 2] = float("nan") if layer else 0
        writer.add(layer, hidden, ids, weights)
    writer.finish("int8", [], SENSITIVITY)
    inputs = ExpertInputs.open(tmp_path / "inputs", "model", SHAPE)
    inputs.layer(0)
    with pytest.raises(SideFileError, match="not finite"):
        inputs.layer(1)


def test_targets(tmp_path: Path) -> None:
    check_inputs_target(tmp_path / "new", force=False)
    write(tmp_path / "there", finish=False)
    check_inputs_target(tmp_path / "there", force=False)  # unfinished: of no use to anybody
    write(tmp_path / "there")
    with pytest.raises(OptionError, match="holds a calibration; --force replaces it"):
        check_inputs_target(tmp_path / "there", force=False)
    check_inputs_target(tmp_path / "there", force=True)
    (tmp_path / "there" / "mine.txt").write_text("x")
    with pytest.raises(OptionError, match=r"is not empty \(it holds mine.txt\)"):
        check_inputs_target(tmp_path / "there", force=True)
    with pytest.raises(OptionError, match="not a directory"):
        check_inputs_target(tmp_path / "there" / "mine.txt", force=True)


def test_a_full_disk_is_said_before_the_files_are_filled(tmp_path: Path) -> None:
    writer = InputsWriter(tmp_path / "inputs", "model", SHAPE, 1 << 50)
    with pytest.raises(SideFileError, match="bytes free"):
        writer.add(0, *given(0, 0, 3))
