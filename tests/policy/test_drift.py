from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaexq.policy.drift import FEWEST, DriftDetector

Size = Callable[[np.random.Generator], int]
LAYERS, EXPERTS = 6, 32
SIZES: dict[str, Size] = {
    "thousands": lambda random: 1000,
    "mixed": lambda random: int(np.exp(random.uniform(np.log(64), np.log(100_000)))),
    "bursts": lambda random: 100_000 if random.random() < 0.05 else 64,
}


class Workload:
    """Skewed traffic, its experts' shares by interval drawn around the true ones; hotness follows as in the product."""

    def __init__(self, seed: int, skew: float, concentration: float) -> None:
        self.random = np.random.default_rng(seed)
        self.skew, self.concentration = skew, concentration
        self.expected = np.zeros((LAYERS, EXPERTS))
        self.detector = DriftDetector(LAYERS, EXPERTS)
        self.switch()

    def switch(self) -> None:
        shares = (1.0 + np.arange(EXPERTS)) ** -self.skew
        self.shares = np.stack([self.random.permutation(shares / shares.sum()) for _ in range(LAYERS)])

    def step(self, selections: int) -> bool:
        drawn = [self.random.dirichlet(self.concentration * layer) for layer in self.shares]
        traffic = np.stack([self.random.multinomial(selections, layer) for layer in drawn]).astype(float)
        shifted = self.detector.observe(traffic, self.expected)
        self.expected = 0.9 * self.expected + 0.1 * traffic
        return shifted


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("skew", "concentration"), [(0.5, 64.0), (1.0, 64.0), (1.0, 320.0), (1.0, 1e6)])
def test_usual_fluctuation_is_no_shift(size: Size, skew: float, concentration: float) -> None:
    fired = []
    for seed in range(5):
        work = Workload(seed, skew, concentration)
        fired += [work.step(size(work.random)) for _ in range(220)][20:]
    assert np.mean(fired) < 0.02


@pytest.mark.parametrize("size", [SIZES["thousands"], SIZES["mixed"]], ids=["thousands", "mixed"])
@pytest.mark.parametrize(("skew", "concentration"), [(0.5, 320.0), (1.0, 64.0), (1.0, 1e6)])
def test_a_switch_is_seen_and_then_got_used_to(size: Size, skew: float, concentration: float) -> None:
    for seed in range(8):
        work = Workload(seed, skew, concentration)
        for _ in range(60):
            work.step(size(work.random))
        work.switch()
        fired = [work.step(1000) for _ in range(30)]
        assert any(fired[:2])
        assert not any(fired[3:])


def test_a_switch_before_hotness_caught_up_with_the_last_one_is_seen() -> None:
    work = Workload(0, 1.0, 320.0)
    for _ in range(40):
        work.step(1000)
    work.switch()
    assert any(work.step(1000) for _ in range(2))
    assert not any(work.step(1000) for _ in range(4))
    work.switch()
    assert any(work.step(1000) for _ in range(2))


def test_a_workload_that_gets_more_diverse_for_good_becomes_usual() -> None:
    work = Workload(0, 1.0, 1e6)
    for _ in range(40):
        work.step(1000)
    work.concentration = 20.0
    fired = [work.step(1000) for _ in range(120)]
    assert sum(fired[60:]) <= 1


def test_too_little_traffic_says_nothing_until_it_adds_up() -> None:
    work = Workload(0, 1.0, 320.0)
    for _ in range(40):
        work.step(1000)
    before = work.detector.distance
    work.switch()
    assert not work.step(int(FEWEST) - 1)
    assert work.detector.distance == before
    assert any(work.step(int(FEWEST) - 1) for _ in range(10))


def test_nothing_expected_and_nothing_routed_say_nothing() -> None:
    detector, some, none = DriftDetector(1, 2), np.array([[900.0, 100.0]]), np.zeros((1, 2))
    assert not any(detector.observe(some, none) for _ in range(50))
    assert not any(detector.observe(none, some) for _ in range(50))
    assert (detector.distance, detector.threshold) == (None, None)


def test_a_layer_without_traffic_is_left_out() -> None:
    detector = DriftDetector(2, 2)
    usual, other = np.array([[900.0, 100.0], [0.0, 0.0]]), np.array([[100.0, 900.0], [0.0, 0.0]])
    assert not any(detector.observe(usual, usual) for _ in range(20))
    assert detector.observe(other, usual)
    assert detector.distance == pytest.approx(0.8, abs=0.01)


@settings(max_examples=50)
@given(st.integers(0, 1 << 30), st.floats(1e-6, 1e6))
def test_the_unit_of_what_is_expected_does_not_matter(seed: int, unit: float) -> None:
    random = np.random.default_rng(seed)
    one, other = DriftDetector(2, 8), DriftDetector(2, 8)
    for _ in range(15):
        traffic, expected = random.poisson(20, (2, 8)).astype(float), random.random((2, 8))
        assert one.observe(traffic, expected) == other.observe(traffic, unit * expected)
        assert one.distance == pytest.approx(other.distance, abs=1e-6)
        assert one.distance is None or 0 <= one.distance <= 1


def test_arrays_are_left_alone_and_shapes_checked() -> None:
    detector = DriftDetector(1, 2)
    traffic, expected = np.array([[30.0, 10.0]]), np.array([[1.0, 1.0]])
    for _ in range(2):
        detector.observe(traffic, expected)
    assert traffic.tolist() == [[30, 10]]
    assert expected.tolist() == [[1, 1]]
    with pytest.raises(AssertionError):
        detector.observe(traffic[0], expected[0])
