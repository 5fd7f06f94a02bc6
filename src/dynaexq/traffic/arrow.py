"""pyarrow, imported when it is first used: most runs do without the 50 MiB that it takes."""

from __future__ import annotations

import importlib
from typing import Any


class _Late:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


pa: Any = _Late("pyarrow")
pq: Any = _Late("pyarrow.parquet")
