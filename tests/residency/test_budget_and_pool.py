"""State machines: whatever is asked, in whatever order, the limit holds and no block is in two hands."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynaexq.core import BLOCK_BYTES, MemoryLimitError
from dynaexq.residency import BlockPool, BudgetTracker

LIMIT = 1000
PARTS = st.sampled_from(["a", "b", "c"])


class BudgetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budget = BudgetTracker(LIMIT)
        self.model = {"a": 0, "b": 0, "c": 0}
        self.peak = 0

    @rule(part=PARTS, nbytes=st.integers(0, 600))
    def reserve(self, part: str, nbytes: int) -> None:
        fits = sum(self.model.values()) + nbytes <= LIMIT
        assert self.budget.try_reserve(part, nbytes) is fits
        if fits:
            self.model[part] += nbytes
            self.peak = max(self.peak, sum(self.model.values()))

    @rule(part=PARTS, nbytes=st.integers(0, 1200))
    def release(self, part: str, nbytes: int) -> None:
        if nbytes > self.model[part]:
            with pytest.raises(AssertionError):
                self.budget.release(part, nbytes)
        else:
            self.budget.release(part, nbytes)
            self.model[part] -= nbytes

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.budget.check_integrity()
        assert self.budget.used == sum(self.model.values())
        assert self.budget.peak == self.peak
        assert {part: self.budget.parts.get(part, 0) for part in self.model} == self.model


class PoolMachine(RuleBasedStateMachine):
    CAPACITY = 5
    BASE = 3 * BLOCK_BYTES
    SIZE = 2 * BLOCK_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.BASE, self.SIZE, self.CAPACITY)
        self.held: list[int] = []

    @rule()
    def take(self) -> None:
        offset = self.pool.take()
        if len(self.held) == self.CAPACITY:
            assert offset is None
        else:
            assert offset is not None
            assert offset not in self.held
            assert (offset - self.BASE) % self.SIZE == 0
            assert self.BASE <= offset < self.BASE + self.CAPACITY * self.SIZE
            self.held.append(offset)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.held:
            offset = data.draw(st.sampled_from(self.held))
            self.held.remove(offset)
            self.pool.give_back(offset)
            with pytest.raises(AssertionError):
                self.pool.give_back(offset)

    @rule(offset=st.integers(0, 20 * BLOCK_BYTES))
    def refuse_strange_offsets(self, offset: int) -> None:
        if offset not in self.held:
            with pytest.raises(AssertionError):
                self.pool.give_back(offset)

    @invariant()
    def free_and_held_add_up(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free == self.CAPACITY - len(self.held)


TestBudget = BudgetMachine.TestCase
TestPool = PoolMachine.TestCase


def test_reserve_says_what_did_not_fit() -> None:
    budget = BudgetTracker(100)
    budget.reserve("dense weights", 60)
    with pytest.raises(MemoryLimitError, match="experts needs 41 bytes, but 60 of the limit of 100"):
        budget.reserve("experts", 41)
    assert budget.parts == {"dense weights": 60}
