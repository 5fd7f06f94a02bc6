"""Fixed-granularity blocks with a constant-time free list."""

from __future__ import annotations

from dynaexq.core import BLOCK_BYTES


class BlockPool:
    """`capacity` blocks of `block_bytes` each, from `base` in the arena (dynaexq paper, section 2)."""

    def __init__(self, base: int, block_bytes: int, capacity: int) -> None:
        assert base % BLOCK_BYTES == 0 and block_bytes % BLOCK_BYTES == 0
        self.base = base
        self.block_bytes = block_bytes
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._taken = bytearray(capacity)

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self) -> int | None:
        """Arena offset of a free block, None when there is none."""
        if not self._free:
            return None
        block = self._free.pop()
        self._taken[block] = 1
        return self.base + block * self.block_bytes

    def give_back(self, offset: int) -> None:
        """Return the block at arena `offset`."""
        block, rest = divmod(offset - self.base, self.block_bytes)
        assert rest == 0 and 0 <= block < self.capacity, f"offset {offset} is no block of this pool"
        assert self._taken[block], f"block {block} is free already"
        self._taken[block] = 0
        self._free.append(block)

    def check_integrity(self) -> None:
        """Assert that every block is either free or taken, once."""
        assert len(set(self._free)) == len(self._free)
        assert len(self._free) + sum(self._taken) == self.capacity
        assert not any(self._taken[block] for block in self._free)
