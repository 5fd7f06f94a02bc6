"""What caches give up first."""

from __future__ import annotations

import numpy as np
import pytest

from dynaexq.policy import caching
from dynaexq.policy.caching import LeastFrequent, LeastRecent, pick_victims


def test_who_was_needed_last_stays() -> None:
    policy = LeastRecent(5)
    for place in (3, 1, 4, 3):
        policy.note(np.array([place]))
    assert pick_victims(policy.worth, np.array([False, True, False, True, True]), 2).tolist() == [1, 4]


def test_who_was_needed_often_stays_until_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "HALF_LIFE", 4)
    policy, both = LeastFrequent(2), np.array([True, True])
    for place in (0, 0, 0, 1):
        policy.note(np.array([place]))
    assert pick_victims(policy.worth, both, 1).tolist() == [1]
    for _ in range(3):
        policy.note(np.array([1]))
    assert pick_victims(policy.worth, both, 1).tolist() == [0]


def test_weights_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "HALF_LIFE", 1)
    policy = LeastFrequent(3)
    for number in range(3000):
        policy.note(np.array([0] if number % 2 else [0, 1]))
        assert np.isfinite(policy.worth).all()
    assert policy.worth[0] > policy.worth[1] > policy.worth[2]
