"""The shadow signal: what it measures is what versions differ by, answers never depend on it, its block is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynaexq.core import ExpertKey, decode_handle
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.loading import load_model, quiet_transformers
from dynaexq.kernels.reference import apply_expert
from dynaexq.residency.versions import VersionedExperts
from dynaexq.runtime import ExpertRuntime
from dynaexq.shadow import ENOUGH, PATIENCE, PRIOR, Shadow
from dynaexq.store import ExpertStore
from dynaexq.store.sensitivity import Sensitivity

quiet_transformers()
IDS = torch.randint(3, 4000, (2, 512), generator=torch.Generator().manual_seed(0))
TOLD = 1e-3
TIERS = ("int2", "int4", "int8", "bf16")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every store says that all experts lose the same, less at higher tiers."""
    losses = np.broadcast_to(TOLD * np.array([3.0, 2.0, 1.0, 0.0]), (6, 32, 4)).copy()
    known = Sensitivity(TIERS, losses, np.full((6, 32), 4 / 32), np.full(6, 0.5), ())
    monkeypatch.setattr(ExpertStore, "sensitivity", known)


def load(store: Path, **tuning: Any) -> tuple[Any, ExpertRuntime]:
    config = DynaExqConfig(
        mode="dynaexq",
        high="int8",
        low="int2",
        expert_memory=9 << 20,
        drive="replay",
        activations="fp32",
        tuning={"shadow": "on", **tuning},
    )
    model = load_model(store, config, torch.float32)
    return model, runtime_of(model)


def parts(runtime: ExpertRuntime) -> tuple[Shadow, VersionedExperts]:
    shadow, experts = runtime.shadow, runtime.experts
    assert shadow is not None and isinstance(experts, VersionedExperts)
    return shadow, experts


def test_what_is_measured_is_what_the_versions_differ_by(embedded_store: Path, told: None) -> None:
    model, runtime = load(embedded_store)
    shadow, experts = parts(runtime)
    assert runtime.control is not None
    runtime.control.steering.pause(True)
    expected: dict[tuple[int, ...], list[float]] = {}

    def tap(layer: int, call: Any) -> None:
        probe = runtime._local.probe
        if probe is None or probe.key.layer != layer:
            return
        rows, places = (found[: -(-len(call.hidden) // 32)] for found in torch.where(call.ids == probe.key.expert))
        words = call.words[probe.key.expert], probe.word
        outputs = [
            apply_expert(experts.weights(decode_handle(int(word))), call.hidden[rows], call.functions, probe.key.expert)
            for word in words
        ]
        gates = call.weights[rows, places].square()
        energies = gates * (outputs[0] - outputs[1]).square().sum(-1)
        expected.setdefault((probe.border, *probe.key), []).extend(energies.tolist())

    runtime.tap = tap
    with torch.inference_mode():
        for _ in range(12):
            model(IDS, use_cache=False)
    assert shadow.counts.probes >= 5 and shadow.counts.selections == sum(map(len, expected.values()))
    corrected = np.argwhere(shadow._drops != TOLD)
    assert len(corrected) == shadow.counts.probes
    for place in map(tuple, corrected.tolist()):
        energies = expected[place]
        wanted = (PRIOR * TOLD + 0.5 * sum(energies)) / (PRIOR + len(energies))
        assert shadow._drops[place] == pytest.approx(wanted, rel=1e-3)


def test_answers_do_not_depend_on_it(embedded_store: Path, told: None) -> None:
    """Levels held, the same passes with it and without, to the bit."""
    model, runtime = load(embedded_store)
    shadow, experts = parts(runtime)
    assert runtime.control is not None
    runtime.control.steering.pause(True)
    with torch.inference_mode():
        first = [model(IDS, use_cache=False).logits for _ in range(4)]
        assert shadow.counts.selections > 0
        runtime.shadow = None
        alone = model(IDS, use_cache=False).logits
    assert all(torch.equal(each, alone) for each in first)
    experts.check_integrity()


def test_its_block_is_not_refilled_while_a_window_may_read_it(embedded_store: Path, told: None) -> None:
    model, runtime = load(embedded_store)
    shadow, experts = parts(runtime)
    with torch.inference_mode():
        model(IDS, use_cache=False)
    hotness = np.ones((6, 32))
    shadow.step(hotness)
    shown = shadow.shown
    assert shown is not None
    size = experts.layouts[decode_handle(shown.word).format_index].extent_bytes
    block = experts.arena.host_view(experts.scratch_offset, size)
    before = block.copy()
    window, _ = experts.handles.pin()  # as a pass that has seen the probe
    for _ in range(PATIENCE + 3):  # nothing comes to it, so it is given up
        shadow.step(hotness)
    assert shadow.shown is None and np.array_equal(block, before)
    experts.handles.release(window)
    shadow.step(hotness)
    assert shadow.shown is not None and shadow.shown != shown


def test_a_probe_of_an_expert_that_moved_tells_nothing(embedded_store: Path, told: None) -> None:
    model, runtime = load(embedded_store)
    shadow, experts = parts(runtime)
    shadow.step(np.ones((6, 32)))
    shown = shadow.shown
    assert shown is not None
    shadow._found.append((shown, ENOUGH, 1e9))
    entry = experts.entries[shown.key]
    entry.epoch += 1  # another version was published
    shadow.step(np.ones((6, 32)))
    assert shadow.shown != shown and (shadow._drops == TOLD).all() and shadow.counts.probes == 0
    del model


def test_an_exchange_that_made_things_worse_is_undone(embedded_store: Path, told: None) -> None:
    """Calibration said that an expert loses most; the shadow finds that it loses nothing: it goes down again."""
    model, runtime = load(embedded_store)
    shadow, experts = parts(runtime)
    control = runtime.control
    assert control is not None
    with torch.inference_mode():
        model(IDS, use_cache=False)
    key = ExpertKey(2, int(control.hotness.scores[2].argmax()))
    border, level = len(experts.tiers) - 2, experts.levels()[key]
    assert level <= border
    shadow._drops[:, key.layer, key.expert] = 0.0
    shadow._since[key] = border, int(level)
    control.update()
    wanted = control.pipeline._wanted
    assert wanted[key] == experts.lowest and shadow.counts.turned >= 1
