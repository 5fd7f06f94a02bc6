"""Fixed-granularity blocks with a constant-time free list."""

from __future__ import annotations

from dynaexq.core import BLOCK_BYTES


class BlockPool:
    """`capacity` blocks of `block_bytes` each, from `base` in the arena (dynaexq paper, section 2).

    A block may leave the pool for good (`withdraw`), and others may join it (`adopt`).
    """

    def __init__(self, base: int, block_bytes: int, capacity: int) -> None:
        assert base % BLOCK_BYTES == 0 and block_bytes % BLOCK_BYTES == 0
        self.block_bytes = block_bytes
        offsets = range(base, base + capacity * block_bytes, block_bytes)
        self._taken = dict.fromkeys(offsets, False)
        self._free = list(reversed(offsets))

    @property
    def capacity(self) -> int:
        """Blocks that belong to the pool."""
        return len(self._taken)

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    @property
    def free_offsets(self) -> tuple[int, ...]:
        """Where they are."""
        return tuple(self._free)

    def holds(self, offset: int) -> bool:
        """Whether the block at arena `offset` belongs to the pool."""
        return offset in self._taken

    def take(self) -> int | None:
        """Arena offset of a free block, None when there is none."""
        if not self._free:
            return None
        offset = self._free.pop()
        self._taken[offset] = True
        return offset

    def give_back(self, offset: int) -> None:
        """Return the block at arena `offset`."""
        assert offset in self._taken, f"offset {offset} is no block of this pool"
        assert self._taken[offset], f"the block at {offset} is free already"
        self._taken[offset] = False
        self._free.append(offset)

    def adopt(self, offset: int) -> None:
        """A free block at arena `offset` belongs to the pool from now on; it is taken last."""
        assert offset % BLOCK_BYTES == 0 and offset not in self._taken
        self._taken[offset] = False
        self._free.insert(0, offset)

    def withdraw(self, offset: int) -> None:
        """The free block at arena `offset` belongs to the pool no more."""
        self._free.remove(offset)
        del self._taken[offset]

    def check_integrity(self) -> None:
        """Assert that every block is either free or taken, once."""
        assert len(set(self._free)) == len(self._free)
        assert len(self._free) + sum(self._taken.values()) == self.capacity
        assert not any(self._taken[offset] for offset in self._free)
