"""Shifts of the workload and the pace of copies, on a real model's routing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dynaexq.control import ControlLoop
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.loading import load_model, quiet_transformers
from dynaexq.policy.pace import LINK_SHARE, Pace, PaceOptions

quiet_transformers()
LINK = 1e9


def run(store: Path, pace: Pace | None = None) -> tuple[ControlLoop, list[float]]:
    """Twelve passes of one kind of tokens, then four of another; the loop, and the routing distance of each pass."""
    config = DynaExqConfig(mode="dynaexq", high="int8", low="int2", expert_memory=9 << 20, drive="replay")
    model = load_model(store, config, torch.float32)
    control = runtime_of(model).control
    assert control is not None
    control.signals.pace = pace
    generator, distances = torch.Generator().manual_seed(0), []
    with torch.inference_mode():
        for passed in range(16):
            least, most = (3, 1500) if passed < 12 else (2500, 4000)
            model(torch.randint(least, most, (1, 1000), generator=generator), use_cache=False)
            distances.append(control.signals.drift.distance or 0.0)
    return control, distances


def test_a_shift_is_seen_once_and_makes_room_for_what_comes(embedded_store: Path) -> None:
    control, distances = run(embedded_store)
    assert control.signals.shifts == 1
    assert distances[12] > 2 * max(distances[2:12])
    assert control.signals.describe()["shifts"] == 1
    # four passes of the new kind, at alpha 0.9, outweigh a tenth of the old, but not all of it
    alone = control.hotness.sums.sum() / (16 * 1000 * 4 * 6)
    assert alone < 0.5


@pytest.mark.parametrize("slow", [False, True])
def test_copies_go_faster_after_a_shift_unless_they_slow_steps_down(embedded_store: Path, slow: bool) -> None:
    pace = Pace(PaceOptions(), LINK)
    control, _ = run(embedded_store, pace)
    control.update(1.0)  # updates of a replay are all at time 0, so the shift was then
    assert control.pipeline.link.limit == LINK_SHARE * LINK
    for moving in (False, True):
        for _ in range(20):
            pace.note_window(0.02 if moving and slow else 0.01, 4, moving)
    control.update(2.0)
    assert control.pipeline.link.limit == (0.5 if slow else 1.0) * LINK_SHARE * LINK
    control.update(100.0)
    assert control.pipeline.link.limit == pytest.approx(PaceOptions.calm_share * LINK)
