"""Fewer high slots while the model runs, and back: memory goes back to the system, and nobody waits for it.

The arena stays; what moves is the border between its pools. A block of a higher tier that is given up becomes a low
block by its beginning, and the rest of its pages are released. Where low versions stay resident anyway, all of it is.
"""

from __future__ import annotations

from dynaexq.core import OptionError
from dynaexq.residency.layout import PoolPlan
from dynaexq.residency.versions import VersionedExperts

Slots = tuple[int, ...]
"""Experts that can be at each tier but the lowest, from the highest down."""


class PoolBorder:
    """Brings the pools of `experts` to wanted numbers of slots, step by step. Called by the control thread."""

    def __init__(self, experts: VersionedExperts) -> None:
        self._experts = experts
        self._wanted: Slots = experts.plan.slots
        self._lent: dict[int, int] = {}  # offset of a block that was given up -> its level
        sizes = experts.plan.sizes
        self._each = [size - (0 if experts.keep_low else sizes[-1]) for size in sizes[:-1]]

    @property
    def plan(self) -> PoolPlan:
        """The pools as they were planned."""
        return self._experts.plan

    @property
    def most(self) -> Slots:
        """Slots that there is memory for."""
        return self._experts.plan.slots

    @property
    def wanted(self) -> Slots:
        """Slots that are allowed now."""
        return self._wanted

    @property
    def wanted_bytes(self) -> int:
        """Expert memory with those."""
        return self.most_bytes - self._freed_by(self._wanted)

    @property
    def least_bytes(self) -> int:
        """Expert memory with every expert at the lowest tier."""
        return self.most_bytes - self._freed_by((0,) * len(self.most))

    @property
    def most_bytes(self) -> int:
        """Expert memory with all slots."""
        return self._experts.arena.nbytes

    def slots_within(self, nbytes: int) -> Slots:
        """The slots that `nbytes` of expert memory afford; the highest go first, they bring least for their bytes.

        Raises:
            OptionError: not even the low tier fits, or the plan has less.
        """
        over = max(self._each, default=0)  # what a plan could not spend of its limit
        if not self.least_bytes <= nbytes <= self.most_bytes + over:
            raise OptionError(
                f"{nbytes} bytes of expert memory: this run can have {self.least_bytes} (all experts low) to "
                f"{self.most_bytes} (as planned at its start)"
            )
        left, missing = list(self.most), max(0, self.most_bytes - nbytes)
        for level, each in enumerate(self._each):
            gone = min(left[level], -(-missing // each))
            left[level] -= gone
            missing = max(0, missing - gone * each)
        return tuple(left)

    def want(self, slots: Slots) -> None:
        """Allow `slots` from now on; who is above its tier beyond that must be demoted by the policy.

        Raises:
            OptionError: more than at the start.
        """
        if any(count > most for count, most in zip(slots, self.most, strict=True)):
            raise OptionError(f"{sum(slots)} high slots are more than the {sum(self.most)} the plan has room for")
        self._wanted = slots

    def step(self) -> None:
        """Do what can be done now."""
        plan = self._experts.plan
        for level, most in enumerate(plan.slots):
            pool, target = self._experts.pools[level], plan.blocks[level] - most + self._wanted[level]
            while pool.capacity > target and pool.free:
                self._give_up(level, pool.free_offsets[-1])
            while pool.capacity < target and self._bring_back(level):
                pass
            self._move_out(level, target - pool.capacity)

    def _freed_by(self, slots: Slots) -> int:
        pairs = zip(self.most, slots, self._each, strict=True)
        return sum((most - count) * each for most, count, each in pairs)

    def _give_up(self, level: int, offset: int) -> None:
        experts = self._experts
        experts.pools[level].withdraw(offset)
        self._lent[offset] = level
        if not experts.keep_low:
            experts.pools[experts.lowest].adopt(offset)
        each = self._each[level]
        experts.release_memory(offset + experts.layouts[level].extent_bytes - each, each)

    def _bring_back(self, level: int) -> bool:
        """Make one free block that was given up a block of `level` again; False where there is none, or no budget."""
        experts, low = self._experts, self._experts.pools[self._experts.lowest]
        lent = self._lent_of(level)
        free = lent if experts.keep_low else lent.intersection(low.free_offsets)
        if not free or not experts.regain_memory(self._each[level]):
            return False
        offset = min(free)
        if not experts.keep_low:
            low.withdraw(offset)
        del self._lent[offset]
        experts.pools[level].adopt(offset)
        return True

    def _move_out(self, level: int, missing: int) -> None:
        """Move low versions out of as many blocks of `level` as are still to be brought back."""
        if missing <= 0 or self._experts.keep_low:
            return
        lent = self._lent_of(level)
        leaving = sum(item.offset in lent for item in self._experts.retired)
        for key in self._experts.resting_low(lent):
            if leaving >= missing or not self._experts.relocate(key):
                return
            leaving += 1

    def _lent_of(self, level: int) -> set[int]:
        return {offset for offset, origin in self._lent.items() if origin == level}
