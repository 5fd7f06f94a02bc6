from __future__ import annotations

import numpy as np
import pytest
import torch

from dynaexq.core import ExpertShape, ModelShape, OptionError
from dynaexq.traffic import RoutedLayer, TrafficRecorder

SHAPE = ModelShape(2, 3, ExpertShape(64, 32))


def layers() -> list[RoutedLayer]:
    ids = torch.tensor([[0, 2], [2, 1]])
    return [RoutedLayer(0, ids, torch.tensor([[0.75, 0.25], [0.5, 0.5]])), RoutedLayer(1, ids[:1], torch.ones(1, 2))]


def test_selections_are_counted_by_phase_and_by_tier() -> None:
    recorder = TrafficRecorder(SHAPE, "count")
    high = np.array([True, False, False, False, False, True])
    recorder.add(layers(), True, high)
    recorder.add(layers()[1:], False, high)
    traffic = recorder.collect()
    assert traffic.windows == 2
    assert traffic.prefill.tolist() == [[1, 1, 2], [1, 0, 1]]
    assert traffic.decode.tolist() == [[0, 0, 0], [1, 0, 1]]
    assert traffic.high.tolist() == [[1, 0, 0], [0, 0, 2]]
    assert recorder.collect().windows == 0


def test_mass_adds_routing_weights() -> None:
    recorder = TrafficRecorder(SHAPE, "mass")
    recorder.add(layers(), False, np.zeros(6, bool))
    assert recorder.collect().decode.tolist() == [[0.75, 0.5, 0.75], [1, 0, 1]]
    with pytest.raises(OptionError, match="unknown hotness signal 'luck'; known signals are count, mass"):
        TrafficRecorder(SHAPE, "luck")
