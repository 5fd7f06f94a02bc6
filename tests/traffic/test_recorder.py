from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaexq.core import ExpertShape, ModelShape, OptionError
from dynaexq.traffic import RoutedLayer, TrafficRecorder
from dynaexq.traffic.recorder import ClosedWindow

SHAPE = ModelShape(2, 3, ExpertShape(64, 32))


def layers() -> list[RoutedLayer]:
    ids = torch.tensor([[0, 2], [2, 1]])
    return [RoutedLayer(0, ids, torch.tensor([[0.75, 0.25], [0.5, 0.5]])), RoutedLayer(1, ids[:1], torch.ones(1, 2))]


def test_selections_are_counted_by_phase_and_by_tier() -> None:
    recorder = TrafficRecorder(SHAPE, 2, "count")
    levels = np.array([0, 1, 1, 1, 1, 0])
    recorder.add(ClosedWindow(layers(), True, levels))
    recorder.add(ClosedWindow(layers()[1:], False, levels))
    traffic = recorder.collect()
    assert traffic.windows == 2
    assert traffic.prefill.tolist() == [[1, 1, 2], [1, 0, 1]]
    assert traffic.decode.tolist() == [[0, 0, 0], [1, 0, 1]]
    assert traffic.by_tier[0].tolist() == [1, 2]
    assert recorder.collect().windows == 0


def test_mass_adds_routing_weights() -> None:
    recorder = TrafficRecorder(SHAPE, 2, "mass")
    recorder.add(ClosedWindow(layers(), False, np.zeros(6, int)))
    assert recorder.collect().decode.tolist() == [[0.75, 0.5, 0.75], [1, 0, 1]]
    with pytest.raises(OptionError, match="unknown hotness signal 'luck'; known signals are count, mass"):
        TrafficRecorder(SHAPE, 2, "luck")
