"""Router traces on disk: which experts every token chose in every forward pass, in Parquet (docs/traces.md).

A row for each token and pass, rows of a pass together, passes in order; what the trace is of is in the file's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dynaexq.core import ModelShape, SideFileError
from dynaexq.traffic.arrow import pa, pq

TRACE_VERSION = 1
HEAD_KEY = b"dynaexq"
MAX_EXPERTS = 1 << 20
"""Of a model, all layers together."""

MAX_ROW_GROUP = 1 << 20
"""Tokens that are read at a time, at most: files of others may have any row groups."""

Column = np.ndarray[Any, np.dtype[Any]]


class TraceHead(BaseModel):
    """What a trace is of.

    Args:
        model: its name, for people.
        fingerprint: of the checkpoint; empty where it is not known.
        hidden, intermediate: of an expert; 0 where it is not known.
        tiers: bytes of a version of each tier that the run had.
        source: recorded, imported or synthetic.
        note: for people.
    """

    model_config = ConfigDict(extra="forbid")
    trace: int = TRACE_VERSION
    model: str = Field(default="", max_length=1000)
    fingerprint: str = Field(default="", max_length=100)
    layers: int = Field(gt=0)
    experts: int = Field(gt=0, le=1 << 16)
    top_k: int = Field(gt=0, le=256)
    hidden: int = Field(default=0, ge=0, le=1 << 20)
    intermediate: int = Field(default=0, ge=0, le=1 << 20)
    tiers: dict[str, int] = {}
    source: str = "recorded"
    note: str = Field(default="", max_length=10_000)

    @model_validator(mode="after")
    def _possible(self) -> TraceHead:
        if self.trace != TRACE_VERSION:
            raise ValueError(f"version {self.trace}, this program reads {TRACE_VERSION}")
        if self.layers * self.experts > MAX_EXPERTS or self.top_k > self.experts:
            raise ValueError(f"{self.layers} layers of {self.experts} experts, {self.top_k} a token")
        return self

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts, experts a token chooses: traces of one shape can be put together."""
        return self.layers, self.experts, self.top_k


class TraceRows(NamedTuple):
    """Some rows: what a token chose in a pass, all columns [tokens] but the last three.

    Args:
        window: int32, number of the pass.
        started: float64, seconds since the recording began when the pass began.
        seconds: float32, how long the pass took; 0 where it is not known.
        prefill: bool, whether the token belongs to a prompt.
        request: int32, number of the sequence; -1 where it is not known.
        expert_bytes: int64, bytes of distinct expert versions that the pass read; 0 where it is not known.
        ids: uint16 [tokens, layers, top_k].
        weights: float32 [tokens, layers, top_k], or None.
        hidden: float16 [tokens, layers, hidden], what routers were given, or None.
    """

    window: Column
    started: Column
    seconds: Column
    prefill: Column
    request: Column
    expert_bytes: Column
    ids: Column
    weights: Column | None
    hidden: Column | None = None

    def cut(self, part: slice | Column) -> TraceRows:
        """Some of them."""
        columns: list[Any] = [None if column is None else column[part] for column in self]
        return TraceRows(*columns)


PLAIN = 7
"""Columns of TraceRows that every trace has."""


def join_rows(parts: Sequence[TraceRows]) -> TraceRows:
    """Rows one after the other; their weights and hidden states, where all have some."""
    columns: list[Any] = [
        None if any(each is None for each in column) else np.concatenate(column) for column in zip(*parts, strict=True)
    ]
    return TraceRows(*columns)


def make_schema(head: TraceHead, weights: bool, hidden: bool = False) -> Any:
    """Columns of a trace, and its head."""
    width = head.layers * head.top_k
    fields = [
        ("window", pa.int32()),
        ("started", pa.float64()),
        ("seconds", pa.float32()),
        ("prefill", pa.bool_()),
        ("request", pa.int32()),
        ("expert_bytes", pa.int64()),
        ("ids", pa.list_(pa.uint16(), width)),
    ]
    if weights:
        fields.append(("weights", pa.list_(pa.float32(), width)))
    if hidden:
        fields.append(("hidden", pa.list_(pa.float16(), head.layers * head.hidden)))
    return pa.schema(fields, {HEAD_KEY: head.model_dump_json().encode()})


class TraceReader:
    """Reads a trace piece by piece."""

    def __init__(self, path: Path, file: Any, head: TraceHead) -> None:
        self.path, self.head = path, head
        self._file = file

    @classmethod
    def open(cls, path: Path) -> TraceReader:
        """Open a trace. Raises SideFileError where it is missing, cut off, or none."""
        try:
            if not path.is_file():
                raise SideFileError(f"{path}: not there, or no regular file; --record FILE makes traces")
            file = pq.ParquetFile(path, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise SideFileError(f"{path} is no whole Parquet file, so no trace: {_first_line(error)}") from error
        schema = file.schema_arrow
        try:
            head = TraceHead.model_validate_json((schema.metadata or {})[HEAD_KEY])
        except KeyError:
            raise SideFileError(f"{path} is no trace: it does not say of what; see `dynaexq trace import`") from None
        except ValidationError as error:
            raise SideFileError(f"{path} is no trace that can be read: {error.errors()[0]['msg']}") from error
        optional = ("weights" in schema.names, "hidden" in schema.names)
        if not schema.remove_metadata().equals(make_schema(head, *optional).remove_metadata()):
            raise SideFileError(f"{path} is no trace: its columns are {', '.join(schema.names)}, of other types")
        groups = [file.metadata.row_group(place).num_rows for place in range(file.num_row_groups)]
        if max(groups, default=0) > MAX_ROW_GROUP:
            raise SideFileError(f"{path}: a row group of {max(groups)} tokens is too large to read at once")
        return cls(path, file, head)

    @property
    def tokens(self) -> int:
        """Rows in all."""
        return int(self._file.metadata.num_rows)

    @property
    def has_weights(self) -> bool:
        """Whether routing weights were kept."""
        return self._has("weights")

    @property
    def has_hidden(self) -> bool:
        """Whether it was kept what routers were given."""
        return self._has("hidden")

    def check_model(self, fingerprint: str, shape: ModelShape) -> None:
        """Raise SideFileError where the trace is of another model."""
        same = (shape.layers, shape.experts) == (self.head.layers, self.head.experts)
        if not same or self.head.fingerprint not in ("", fingerprint):
            raise SideFileError(
                f"{self.path} is a trace of another model: {self.head.model or 'unknown'}, {self.head.layers} layers "
                f"of {self.head.experts} experts"
            )

    def batches(self, weights: bool = False, hidden: bool = False) -> Iterator[TraceRows]:
        """All rows, in pieces that end anywhere, with weights and hidden states where they are there and wanted.

        Raises:
            SideFileError: the file is damaged, passes are out of order, or experts are not there.
        """
        last = -1
        names = [*TraceRows._fields[:PLAIN]]
        names += [name for name, wanted in (("weights", weights), ("hidden", hidden)) if wanted and self._has(name)]
        for rows in self._groups(names):
            if not len(rows.window):
                continue
            if int(rows.ids.max()) >= self.head.experts:
                raise SideFileError(f"{self.path}: expert {rows.ids.max()}, where layers have {self.head.experts}")
            if rows.window[0] < last or (np.diff(rows.window) < 0).any():
                raise SideFileError(f"{self.path}: forward passes are out of order")
            last = int(rows.window[-1])
            yield rows

    def _has(self, name: str) -> bool:
        return name in self._file.schema_arrow.names

    def _groups(self, names: list[str]) -> Iterator[TraceRows]:
        """Row groups, each read while the one before is in use."""

        def read(place: int) -> TraceRows:
            try:
                return self._convert(self._file.read_row_group(place, columns=names), names)
            except (OSError, pa.ArrowException, ValueError) as error:
                raise SideFileError(f"{self.path} is damaged: {_first_line(error)}") from error

        count = self._file.num_row_groups
        with ThreadPoolExecutor(1, "dynaexq-trace") as pool:
            ahead: list[Future[TraceRows]] = []
            for place in range(count):
                rows = ahead.pop().result() if ahead else read(place)
                if place + 1 < count:
                    ahead.append(pool.submit(read, place + 1))
                yield rows

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _convert(self, table: Any, names: list[str]) -> TraceRows:
        columns: list[Any] = [_read_column(table.column(name), name) for name in names[: PLAIN - 1]]
        shape = (table.num_rows, self.head.layers, -1)
        lists = {name: _flatten(table, name).reshape(shape) for name in names[PLAIN - 1 :]}
        columns += [lists["ids"], lists.get("weights"), lists.get("hidden")]
        return TraceRows(*columns)


def _flatten(table: Any, name: str) -> Column:
    """Values of a column of lists, one after the other. Raises ValueError where some are missing."""
    column = table.column(name)
    if column.null_count:
        raise ValueError(f"empty {name}")
    return np.concatenate([_read_column(chunk.flatten(), name) for chunk in column.chunks])


def _read_column(column: Any, name: str) -> Column:
    """Values of a plain column. Raises ValueError where some are missing."""
    if column.null_count:
        raise ValueError(f"values of {name} are missing")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _first_line(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).strip().splitlines()[0]
