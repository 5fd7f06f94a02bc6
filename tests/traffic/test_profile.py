"""Traffic profiles: what is saved comes back, what is damaged or foreign does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynaexq.core import ExpertShape, ModelShape, StoreError
from dynaexq.traffic import TrafficProfile

SHAPE = ModelShape(2, 3, ExpertShape(64, 32))
SUMS = np.array([[0.1, 2.0, 3.5], [1e-9, 0.0, 7.0]])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "profile.json"
    TrafficProfile.of("model", "count", SUMS, 12, ["a.txt"]).save(target)
    return target


def test_a_profile_comes_back_to_the_bit(path: Path) -> None:
    loaded = TrafficProfile.load(path, "model", SHAPE)
    assert np.array_equal(loaded.sums, SUMS)
    assert (loaded.routed, loaded.signal, loaded.texts) == (12, "count", ["a.txt"])
    assert not list(path.parent.glob("*.partial"))


def test_profiles_of_other_models_are_refused(path: Path) -> None:
    with pytest.raises(StoreError, match="another model"):
        TrafficProfile.load(path, "other", SHAPE)
    with pytest.raises(StoreError, match="another model"):
        TrafficProfile.load(path, "model", ModelShape(2, 4, SHAPE.expert))


def change(name: str, value: Any) -> Any:
    def apply(text: str) -> str:
        return json.dumps({**json.loads(text), name: value})

    return apply


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: "",
        lambda text: text.replace("3.5", "3.6"),
        lambda text: text.replace("3.5", "NaN"),
        change("hotness", [[1.0], [1.0, 2.0]]),
        change("hotness", [[]]),
        change("hotness", []),
        change("hotness", [[-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        change("traffic_profile", 2),
        change("hotness", [[1e308, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        change("more", 1),
        lambda text: "[]",
    ],
)
def test_damaged_profiles_are_refused_by_name(path: Path, damage: Any) -> None:
    path.write_text(damage(path.read_text()))
    with pytest.raises(StoreError, match=r"profile\.json is no whole traffic profile"):
        TrafficProfile.load(path, "model", SHAPE)


def test_unreadable_profiles_are_refused_by_name(path: Path) -> None:
    with pytest.raises(StoreError, match="no regular file"):
        TrafficProfile.load(path.parent, "model", SHAPE)
    with pytest.raises(StoreError, match="cannot read"):
        TrafficProfile.load(path.parent / "none.json", "model", SHAPE)
