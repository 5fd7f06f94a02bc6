"""How much noise in a layer's outputs matters: the measurement on loaded models."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaexq.core import CheckpointError, ExpertShape, ModelShape
from dynaexq.integrations.transformers import runtime_of, sensitivity
from dynaexq.integrations.transformers.sensitivity import measure_sensitivity
from dynaexq.traffic import TrafficMeter
from support.files import silent
from support.tiny_models import FAMILIES, load, write_checkpoint

WINDOWS = [[5, 9, 200, 31, 77, 12, 8, 140] * 8, [3, 4, 250, 61, 11], [17]]


@pytest.fixture
def model(checkpoint_directory: Path) -> Any:
    return load(checkpoint_directory, mode="full")


def experts_of(model: Any, layer: int) -> Any:
    return model.model.layers[layer].mlp.experts


def test_it_repeats_and_is_no_traffic(model: Any) -> None:
    runtime = runtime_of(model)
    meter = TrafficMeter(ModelShape(2, 8, ExpertShape(64, 32)))
    tapped: list[int] = []
    passes: list[tuple[int, int]] = []
    runtime.listener, runtime.tap = meter, lambda layer, call: tapped.append(layer)
    first = measure_sensitivity(model, WINDOWS, lambda done, total: passes.append((done, total)))
    assert len(first) == 2 and all(each > 0 for each in first)
    assert measure_sensitivity(model, WINDOWS, silent) == first
    assert passes == [(done, 12) for done in range(1, 13)]
    assert not meter.sums.any() and not tapped
    model(torch.tensor([WINDOWS[0]]))
    assert meter.sums.any() and tapped == [0, 1]  # both are in place again
    assert not any(experts_of(model, layer)._forward_hooks for layer in range(2))


def test_divergence_grows_with_the_energy_of_noise(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    strong = measure_sensitivity(model, WINDOWS, silent)
    monkeypatch.setattr(sensitivity, "NOISE", sensitivity.NOISE / 4)
    weak = measure_sensitivity(model, WINDOWS, silent)
    assert weak == pytest.approx(strong, rel=0.25)


def test_it_follows_the_units_of_a_layer_alone(model: Any) -> None:
    """Outputs of a layer that are taken four times as large on their way matter 16 times as much."""
    before = measure_sensitivity(model, WINDOWS, silent)
    block = model.model.layers[1].mlp
    forward = experts_of(model, 1).forward
    experts_of(model, 1).forward = lambda *call: forward(*call) / 4
    block.register_forward_hook(lambda _, __, output: output * 4)
    assert measure_sensitivity(model, WINDOWS, silent) == pytest.approx([before[0], 16 * before[1]], rel=1e-3)


def test_a_layer_that_puts_out_nothing_loses_nothing(model: Any) -> None:
    experts = experts_of(model, 0)
    experts.forward = functools.partial(lambda forward, *call: forward(*call) * 0, experts.forward)
    first, second = measure_sensitivity(model, WINDOWS, silent)
    assert first == 0 < second


def test_a_massive_token_does_not_decide_how_large_noise_is(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[float] = []
    noise = sensitivity._noise
    monkeypatch.setattr(
        sensitivity, "_noise", lambda module, size, seed: (sizes.append(size), noise(module, size, seed))[1]
    )
    measure_sensitivity(model, WINDOWS[:1], silent)
    experts_of(model, 1).register_forward_hook(lambda _, __, output: torch.cat((1e4 * output[:1], output[1:])))
    measure_sensitivity(model, WINDOWS[:1], silent)
    assert sizes[2] == sizes[0]
    assert sizes[1] < sizes[3] < 3 * sizes[1]  # sqrt(1 + 100 / 64) instead of 1e4 / 8


def test_a_model_that_does_not_compute_is_refused(model: Any) -> None:
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="not finite"):
        measure_sensitivity(model, WINDOWS, silent)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"qwen3_moe"}))
def test_every_family_takes_noise(family: str, tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, family), mode="full")
    found = measure_sensitivity(model, WINDOWS[1:], silent)
    assert len(found) == runtime_of(model).experts.shape.layers
    assert all(each > 0 for each in found)
