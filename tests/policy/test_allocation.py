"""The allocation of tiers against an exact knapsack, and what it promises of any losses."""

from __future__ import annotations

from typing import Any

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaexq.policy.allocation import allocate

SIZES = [10, 14, 18, 33]
"""As int2, int3, int4 and int8 are to each other."""


def convex_losses(random: Any, items: int) -> Any:
    """What experts lose at each tier: hotness times an error that falls convexly in bytes."""
    errors = np.array([16.0, 4.0, 1.0, 0.06]) * random.uniform(0.7, 1.3, (items, 1)) ** np.arange(4)
    return random.gamma(0.5, 2.0, (items, 1)) * errors


def solve_exactly(losses: Any, sizes: list[int], budget: int) -> float:
    """The least loss in all: a multiple-choice knapsack as an integer program."""
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    items, tiers = losses.shape
    for loss in losses.ravel():
        solver.addCol(float(loss), 0.0, 1.0, 0, [], [])
    solver.changeColsIntegrality(items * tiers, np.arange(items * tiers), [highspy.HighsVarType.kInteger] * losses.size)
    for item in range(items):
        solver.addRow(1.0, 1.0, tiers, np.arange(tiers) + item * tiers, np.ones(tiers))
    solver.addRow(-highspy.kHighsInf, budget, losses.size, np.arange(losses.size), np.tile(sizes, items).astype(float))
    solver.run()
    return float(solver.getObjectiveValue())


def loss_of(losses: Any, tiers: Any) -> float:
    return float(losses[np.arange(len(losses)), tiers].sum())


@pytest.mark.parametrize("seed", range(12))
def test_it_is_within_one_step_of_the_exact_optimum(seed: int) -> None:
    random = np.random.default_rng(seed)
    losses = convex_losses(random, 24)
    budget = int(random.uniform(1.05, 2.5) * 10 * 24)
    found = allocate(losses, SIZES, budget)
    assert np.array(SIZES)[found.tiers].sum() <= budget
    exact = solve_exactly(losses, SIZES, budget)
    largest_step = max(SIZES[1:]) - SIZES[0]
    assert exact - 1e-6 <= loss_of(losses, found.tiers) <= exact + found.price * largest_step


def test_with_many_experts_nothing_measurable_is_lost() -> None:
    losses = convex_losses(np.random.default_rng(0), 400)
    exact = solve_exactly(losses, SIZES, 400 * 15)
    assert loss_of(losses, allocate(losses, SIZES, 400 * 15).tiers) <= 1.003 * exact


@given(
    seed=st.integers(0, 10_000),
    items=st.integers(1, 40),
    fill=st.floats(0, 1),
    zeros=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_losses(seed: int, items: int, fill: float, zeros: bool) -> None:
    """Never over budget or below what is pinned; a tier that saves nothing is never bought; more bytes never lose."""
    random = np.random.default_rng(seed)
    losses = random.random((items, 4)) * (random.integers(0, 2, (items, 1)) if zeros else 1)
    least = random.integers(0, 4, items) * (random.random(items) < 0.2)
    floor = int(np.array(SIZES)[least].sum())
    budget = floor + int(fill * (33 * items - floor))
    tiers = allocate(losses, SIZES, budget, least).tiers
    assert np.array(SIZES)[tiers].sum() <= budget and (tiers >= least).all()
    assert (losses[np.arange(items), tiers] <= losses[np.arange(items), least]).all()
    assert (tiers[losses.sum(1) == 0] == least[losses.sum(1) == 0]).all()
    everything = allocate(losses, SIZES, 33 * items, least).tiers
    assert loss_of(losses, everything) <= loss_of(losses, tiers) + 1e-12


def test_a_smaller_budget_of_what_was_spent_gives_the_same() -> None:
    losses = convex_losses(np.random.default_rng(3), 50)
    first = allocate(losses, SIZES, 777).tiers
    again = allocate(losses, SIZES, int(np.array(SIZES)[first].sum())).tiers
    assert np.array_equal(first, again)
