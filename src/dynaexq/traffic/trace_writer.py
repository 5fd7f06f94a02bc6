"""Writes router traces: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from dynaexq.core import OptionError, SideFileError
from dynaexq.traffic.arrow import pa, pq
from dynaexq.traffic.own_files import check_own_file
from dynaexq.traffic.trace import Column, TraceHead, TraceReader, TraceRows, make_schema

ROW_GROUP = 8192
"""Tokens that are kept in memory and written together."""

BEGINNING = b"PAR1"
"""Of every Parquet file."""

MIN_FREE_BYTES = 64 << 20
"""On the disk: with less, nothing more is written, so that what was can be finished."""

REPEATING = ["window", "started", "seconds", "request", "expert_bytes", "ids.list.element"]
"""Columns whose values come again and again. Weights do not: a dictionary of them takes three times as long."""

HIDDEN_GROUP_BYTES = 32 << 20
"""Of hidden states that are kept in memory and written together."""

LIST_TYPES = {"ids": np.uint16, "weights": np.float32, "hidden": np.float16}
TYPES = (np.int32, np.float64, np.float32, np.bool_, np.int32, np.int64)


def check_trace_target(path: Path, option: str) -> None:
    """Raise OptionError unless `path` can become a trace."""
    if path.suffix not in (".parquet", ".trace"):
        raise OptionError(f"{option} {path}: name a file that ends in .parquet")
    check_own_file(path, option, "trace", BEGINNING)
    if path.is_file() and path.stat().st_size:
        try:
            TraceReader.open(path).close()
        except SideFileError as error:
            raise OptionError(f"{option}: {error}; it is not overwritten, name another file") from error


class TraceWriter:
    """A trace under another name beside `path`, which it gets when it is closed: an earlier one stays until then."""

    def __init__(self, path: Path, head: TraceHead, weights: bool, hidden: bool = False) -> None:
        """Begin a trace. Raises SideFileError where it cannot be written."""
        self.path, self.head, self.tokens, self.abandoned = path, head, 0, False
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._schema = make_schema(head, weights, hidden)
        row_bytes = 2 * head.layers * head.hidden if hidden else 1
        self._row_group = min(ROW_GROUP, max(1, HIDDEN_GROUP_BYTES // row_bytes))
        self._held: list[TraceRows] = []
        self._holding = 0
        try:
            self._writer = pq.ParquetWriter(
                self._partial, self._schema, compression="zstd", use_dictionary=REPEATING, write_page_checksum=True
            )
        except OSError as error:
            raise self._failure(error) from error

    def add(self, rows: TraceRows) -> None:
        """Take rows, whose passes follow those before.

        Raises SideFileError where they cannot be written; after that, nothing is there unless the disk was only low.
        """
        self._held.append(rows)
        self._holding += len(rows.window)
        if self._holding >= self._row_group:
            if (free := shutil.disk_usage(self._partial.parent).free) < MIN_FREE_BYTES:
                raise SideFileError(f"cannot write the trace {self.path}: {free >> 20} MiB are free on its disk")
            self._write()

    @property
    def taken(self) -> int:
        """Rows so far."""
        return self.tokens + self._holding

    def close(self) -> None:
        """Finish the file. Raises SideFileError where that fails."""
        try:
            self._write()
            self._writer.close()
            self._partial.replace(self.path)
        except OSError as error:
            raise self._failure(error) from error

    def abandon(self) -> None:
        """Leave nothing."""
        self.abandoned = True
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    def _write(self) -> None:
        if not self._holding:
            return
        held, self._held, self._holding = self._held, [], 0
        columns = [
            pa.array(np.concatenate([rows[place] for rows in held]).astype(kind)) for place, kind in enumerate(TYPES)
        ]
        for name, kind in LIST_TYPES.items():
            if name in self._schema.names:
                columns.append(self._lists([getattr(rows, name) for rows in held], kind))
        self.tokens += len(columns[0])
        try:
            self._writer.write_table(pa.table(columns, schema=self._schema))
        except (OSError, pa.ArrowException) as error:
            raise self._failure(error) from error

    def _lists(self, parts: list[Column], kind: type) -> Any:
        width = parts[0][0].size
        flat: Column = np.concatenate([part.reshape(-1) for part in parts]).astype(kind, copy=False)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat), width)

    def _failure(self, error: Exception) -> SideFileError:
        self.abandon() if hasattr(self, "_writer") else None
        return SideFileError(f"cannot write the trace {self.path}: {getattr(error, 'strerror', None) or error}")
