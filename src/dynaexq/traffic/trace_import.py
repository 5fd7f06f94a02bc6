"""Traces of other programs: lists of expert ids for each token, as JSON, JSON lines, CSV or NPZ."""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynaexq.core import OptionError, SideFileError
from dynaexq.traffic.trace import Column, TraceHead, TraceRows

FORMATS = ("json", "jsonl", "csv", "npz")
MAX_BYTES = 2 << 30
MAX_JSON_BYTES = 256 << 20
"""Of one JSON document, which is read at once and takes many times that."""

MAX_LINE_BYTES = 4 << 20
PIECE = 4096
"""Tokens that are put together before they are written."""


class Imported(NamedTuple):
    """What a file holds: ids [tokens, layers, top_k] from 0 up, and weights of the same shape or None."""

    ids: Column
    weights: Column | None


def read_foreign(path: Path, form: str | None) -> Imported:
    """Read a file of one of FORMATS; None: by its name.

    Raises:
        OptionError: an unknown format.
        SideFileError: the file is missing, too large, or not in that format; the text says where.
    """
    form = form or path.suffix.lower().lstrip(".")
    if form not in FORMATS:
        raise OptionError(f"{path}: format '{form}' is unknown; say --format, one of {', '.join(FORMATS)}")
    try:
        most = MAX_JSON_BYTES if form == "json" else MAX_BYTES
        if path.stat().st_size > most:
            raise SideFileError(f"{path} is larger than {most >> 20} MiB; cut it into pieces and merge the traces")
        if form == "npz":
            return _read_npz(path)
        with path.open(encoding="utf-8", newline="") as file:
            tokens = {"json": _read_json, "jsonl": _read_lines, "csv": _read_csv}[form](file)
            return Imported(_stack(tokens), None)
    except OSError as error:
        raise SideFileError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, EOFError, RecursionError, zipfile.BadZipFile, KeyError, csv.Error) as error:
        raise SideFileError(f"{path} is no {form} of expert ids: {str(error) or type(error).__name__}") from error


def make_rows(found: Imported, batch: int, prompt: int) -> Iterator[TraceRows]:
    """Rows of imported tokens: the first `prompt` as one pass, the others in passes of `batch`. Times are not known."""
    total = len(found.ids)
    number = np.arange(total)
    window = np.where(number < prompt, 0, (1 if prompt else 0) + (number - prompt) // batch).astype(np.int32)
    request = np.where(number < prompt, 0, (number - prompt) % batch).astype(np.int32)
    for start in range(0, total, PIECE):
        part = slice(start, min(total, start + PIECE))
        count = part.stop - part.start
        yield TraceRows(
            window=window[part],
            started=np.zeros(count),
            seconds=np.zeros(count, np.float32),
            prefill=number[part] < prompt,
            request=request[part],
            expert_bytes=np.zeros(count, np.int64),
            ids=found.ids[part].astype(np.uint16),
            weights=None if found.weights is None else found.weights[part],
        )


def make_head(found: Imported, experts: int | None, expert: tuple[int, int], name: str) -> TraceHead:
    """What an imported trace is of; `experts` of a layer, as many as are named where it is None. Raises OptionError."""
    _, layers, top_k = found.ids.shape
    most = int(found.ids.max()) + 1
    if experts is not None and most > experts:
        raise OptionError(f"--experts {experts}: the file names expert {most - 1}")
    try:
        return TraceHead(
            model=name,
            layers=layers,
            experts=experts or most,
            top_k=top_k,
            hidden=expert[0],
            intermediate=expert[1],
            source="imported",
        )
    except ValueError as error:
        raise OptionError(f"{name}: {layers} layers of {experts or most} experts, {top_k} a token: {error}") from error


def _read_npz(path: Path) -> Imported:
    with np.load(path, allow_pickle=False) as file:
        ids = file["ids"]
        weights = file["weights"].astype(np.float32) if "weights" in file.files else None
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape:
        raise ValueError(f"'ids' is {ids.dtype} {list(ids.shape)}, not integers [tokens, layers, top_k]")
    if ids.min() < 0 or ids.max() >= 1 << 16:
        raise ValueError("expert ids out of range")
    if weights is not None and (weights.shape != ids.shape or not np.isfinite(weights).all()):
        raise ValueError("'weights' is not of the shape of 'ids', or not finite")
    return Imported(ids, weights)


def _read_json(file: Any) -> Iterator[tuple[int, Any]]:
    whole = json.load(file)
    if not isinstance(whole, list):
        raise ValueError("not a list of tokens")
    yield from enumerate(whole, 1)


def _read_lines(file: Any) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, 1):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"line {number} is too long")
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def _read_csv(file: Any) -> Iterator[tuple[int, Any]]:
    """Rows of token, layer and experts; those of a token together, layers from 0 up."""
    rows = csv.reader(file)
    head = next(rows, [])
    if [name.strip().lower() for name in head[:2]] != ["token", "layer"] or len(head) < 3:
        raise ValueError("line 1 is not token,layer,expert0,...")
    token: list[list[int]] = []
    name = None
    for number, row in enumerate(rows, 2):
        if not row:
            continue
        try:
            values = [int(value) for value in row[1:]]
        except ValueError:
            raise ValueError(f"line {number}: not all numbers") from None
        if row[0] != name:
            if token:
                yield number - 1, token
            name, token = row[0], []
        if values[0] != len(token):
            raise ValueError(f"line {number}: layer {values[0]} of token {name}, where {len(token)} comes next")
        token.append(values[1:])
    if token:
        yield number, token


def _stack(tokens: Iterator[tuple[int, Any]]) -> Column:
    """[tokens, layers, top_k] of lists of lists of ids."""
    found: list[Column] = []
    for number, token in tokens:
        layers = token.get("experts") if isinstance(token, dict) else token
        try:
            ids = np.array(layers)
        except ValueError:
            ids = np.zeros(0)
        if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.size == 0:
            raise ValueError(f"token or line {number}: not a list of ids for every layer, as many in each")
        if ids.min() < 0 or ids.max() >= 1 << 16:
            raise ValueError(f"token or line {number}: expert ids out of range")
        if found and ids.shape != found[0].shape:
            raise ValueError(f"token or line {number}: {list(ids.shape)} ids, where others have {list(found[0].shape)}")
        found.append(ids.astype(np.uint16))
    if not found:
        raise ValueError("no tokens")
    return np.stack(found)
