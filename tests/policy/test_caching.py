"""What caches give up first."""

from __future__ import annotations

import numpy as np
import pytest

from dynaexq.policy import caching
from dynaexq.policy.caching import CacheMap, CachePolicy, LeastFrequent, LeastRecent


def fill(cache: CacheMap, resident: list[int]) -> CacheMap:
    """Experts that came without being needed."""
    for place in resident:
        assert cache.foresee(place) is not None
    cache.admit(np.array(resident))
    return cache


def leaves(policy: CachePolicy, resident: list[int], needed: int) -> list[int]:
    """Who leaves a full cache for somebody else."""
    cache = fill(CacheMap(len(policy.worth), len(resident), policy), resident)
    missing, victims = cache.need(np.array([needed]))
    assert missing.tolist() == [needed]
    return sorted(victims.tolist())


def test_who_was_needed_last_stays() -> None:
    policy = LeastRecent(5, 1)
    for place in (3, 1, 4, 3):
        policy.note(np.array([place]))
    assert leaves(policy, [1, 3, 4], 0) == [1]
    assert leaves(policy, [3, 4], 1) == [4]


def test_who_was_needed_often_stays_until_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "HALF_LIFE", 4)
    policy = LeastFrequent(3, 1)
    for place in (0, 0, 0, 1):
        policy.note(np.array([place]))
    assert leaves(policy, [0, 1], 2) == [1]
    for _ in range(3):
        policy.note(np.array([1]))
    assert leaves(policy, [0, 1], 2) == [0]


def test_weights_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching, "HALF_LIFE", 1)
    policy = LeastFrequent(3, 1)
    for number in range(3000):
        policy.note(np.array([0] if number % 2 else [0, 1]))
        assert np.isfinite(policy.worth).all()
    assert policy.worth[0] > policy.worth[1] > policy.worth[2]


def test_needs_beyond_the_capacity_are_split_residents_first() -> None:
    cache = fill(CacheMap(8, 3, LeastRecent(8, 1)), [6, 2])
    groups = [group.tolist() for group in cache.split(np.array([0, 2, 3, 6, 7]))]
    assert groups == [[2, 6, 0], [3, 7]]
    assert [group.tolist() for group in cache.split(np.array([1, 6]))] == [[1, 6]]
