"""Every byte of device memory is reserved here before it is allocated."""

from __future__ import annotations

import threading

from dynaexq.core import MemoryLimitError


class BudgetTracker:
    """A hard cap on reserved bytes, by named part. Thread-safe (dynaexq paper, section 2: BudgetTracker)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._parts: dict[str, int] = {}
        self._peak = 0
        self._lock = threading.Lock()

    def try_reserve(self, part: str, nbytes: int) -> bool:
        """Reserve `nbytes` for `part`; False, and nothing reserved, where the limit would be passed."""
        assert nbytes >= 0
        with self._lock:
            if self.used + nbytes > self.limit:
                return False
            self._parts[part] = self._parts.get(part, 0) + nbytes
            self._peak = max(self._peak, self.used)
            return True

    def reserve(self, part: str, nbytes: int) -> None:
        """Like `try_reserve`, but raises MemoryLimitError."""
        if not self.try_reserve(part, nbytes):
            raise MemoryLimitError(
                f"{part} needs {nbytes} bytes, but {self.used} of the limit of {self.limit} bytes are reserved"
            )

    def release(self, part: str, nbytes: int) -> None:
        """Give back bytes reserved for `part`."""
        with self._lock:
            held = self._parts.get(part, 0)
            assert 0 <= nbytes <= held, f"released {nbytes} bytes of {part}, which holds {held}"
            self._parts[part] = held - nbytes

    @property
    def used(self) -> int:
        """Bytes reserved now."""
        return sum(self._parts.values())

    @property
    def peak(self) -> int:
        """Most bytes ever reserved at once."""
        return self._peak

    @property
    def parts(self) -> dict[str, int]:
        """Bytes reserved now, by part."""
        return dict(self._parts)

    def check_integrity(self) -> None:
        """Assert the invariants: within the limit, nothing negative, peak at least what is used."""
        assert 0 <= self.used <= self.limit and self.used <= self._peak <= self.limit
        assert all(nbytes >= 0 for nbytes in self._parts.values())
