"""Fewer high slots while the model runs, and back: memory goes back to the system, and nobody waits for it.

The arena stays; what moves is the border between its pools. A high block that is given up becomes a low block by its
beginning, and the rest of its pages are released. Where low versions stay resident anyway, all of it is released.
"""

from __future__ import annotations

from dynaexq.core import OptionError
from dynaexq.residency.layout import Capacity
from dynaexq.residency.versions import HIGH, LOW, VersionedExperts


class PoolBorder:
    """Brings the pools of `experts` to a wanted number of high slots, step by step. Called by the control thread."""

    def __init__(self, experts: VersionedExperts) -> None:
        self._experts = experts
        self._most: Capacity = experts.capacity.copy()
        self._lent: set[int] = set()  # offsets of high blocks that were given up
        self._each = experts.layouts[HIGH].extent_bytes
        if not experts.keep_low:
            self._each -= experts.layouts[LOW].extent_bytes

    @property
    def most(self) -> Capacity:
        """High slots by layer that there is memory for."""
        return self._most

    @property
    def wanted(self) -> Capacity:
        """High slots by layer that are allowed now."""
        return self._experts.capacity

    @property
    def wanted_bytes(self) -> int:
        """Expert memory with those."""
        return self.most_bytes - int(self._most.sum() - self.wanted.sum()) * self._each

    @property
    def least_bytes(self) -> int:
        """Expert memory without any high slot."""
        return self.most_bytes - int(self._most.sum()) * self._each

    @property
    def most_bytes(self) -> int:
        """Expert memory with all of them."""
        return self._experts.arena.nbytes

    def slots_within(self, nbytes: int) -> int:
        """High slots that `nbytes` of expert memory afford.

        Raises:
            OptionError: not even the low tier fits, or the plan has less.
        """
        if not self.least_bytes <= nbytes <= self.most_bytes:
            raise OptionError(
                f"{nbytes} bytes of expert memory: this run can have {self.least_bytes} (all experts low) to "
                f"{self.most_bytes} (as planned at its start)"
            )
        return int(self._most.sum()) - -(-(self.most_bytes - nbytes) // self._each)

    def want(self, capacity: Capacity) -> None:
        """Allow `capacity` [layers] high slots from now on; who is high beyond that must be demoted by the policy.

        Raises:
            OptionError: more than at the start.
        """
        if (capacity > self._most).any():
            raise OptionError(f"{capacity.sum()} high slots are more than the {self._most.sum()} the plan has room for")
        self._experts.capacity = capacity

    def step(self) -> None:
        """Do what can be done now."""
        high = self._experts.pools[HIGH]
        target = int(self._experts.capacity.sum())
        while high.capacity > target and high.free:
            self._give_up(high.free_offsets[-1])
        while high.capacity < target and self._bring_back():
            pass
        self._move_out(target - high.capacity)

    def _give_up(self, offset: int) -> None:
        experts = self._experts
        experts.pools[HIGH].withdraw(offset)
        self._lent.add(offset)
        if not experts.keep_low:
            experts.pools[LOW].adopt(offset)
        experts.release_memory(offset + experts.layouts[HIGH].extent_bytes - self._each, self._each)

    def _bring_back(self) -> bool:
        """Make one free block that was given up a high block again; False where there is none, or no budget."""
        experts = self._experts
        free = self._lent if experts.keep_low else self._lent.intersection(experts.pools[LOW].free_offsets)
        if not free or not experts.regain_memory(self._each):
            return False
        offset = min(free)
        if not experts.keep_low:
            experts.pools[LOW].withdraw(offset)
        self._lent.remove(offset)
        experts.pools[HIGH].adopt(offset)
        return True

    def _move_out(self, missing: int) -> None:
        """Move low versions out of as many blocks as are still to be brought back."""
        if missing <= 0 or self._experts.keep_low:
            return
        leaving = sum(item.offset in self._lent for item in self._experts.retired)
        for key in self._experts.resting_low(self._lent):
            if leaving >= missing or not self._experts.relocate(key):
                return
            leaving += 1
