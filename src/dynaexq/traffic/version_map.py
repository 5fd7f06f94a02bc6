"""The tier of every expert in every window of a run, in a file: a run that can be repeated to the bit.

One JSON object a line: what the map is of, then every change (`window`, and `to` each tier the experts that came
there, numbered as ModelShape.index does; at first all are at the lowest), at the end the number of windows. A killed
run leaves a map without an end, which is no map.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dynaexq.core import ModelShape, SideFileError
from dynaexq.traffic.own_files import check_own_file
from dynaexq.traffic.recorder import Levels

MAP_VERSION = 2
BEGINNING = b'{"version_map":'
MAX_LINE_BYTES = 16 << 20

Numbers = list[Annotated[int, Field(ge=0)]]


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MapHead(_Line):
    """What a map is of."""

    version_map: int = MAP_VERSION
    fingerprint: str
    tiers: tuple[str, ...] = Field(min_length=2)
    layers: int
    experts: int
    slots: tuple[int, ...]


class _Change(_Line):
    window: Annotated[int, Field(ge=0)]
    to: list[Numbers]


class _End(_Line):
    windows: Annotated[int, Field(ge=0)]


def check_map_file(path: Path) -> None:
    """Raise OptionError unless `path` can become a version map."""
    check_own_file(path, "record-map", "version map", BEGINNING)


class MapRecorder:
    """Writes the map of a run, window by window. Called by one thread."""

    def __init__(self, path: Path, head: MapHead) -> None:
        """Begin the file. Raises SideFileError where it cannot be written."""
        self._path = path
        self._tiers = len(head.tiers)
        self._last = _all_low(head)
        self._windows = 0
        try:
            self._file = path.open("w", encoding="utf-8", buffering=1)  # by lines: a killed run loses none
        except OSError as error:
            raise SideFileError(f"cannot write {path}: {error.strerror or error}") from error
        self._write(head)

    def note(self, levels: Levels, windows: int = 1) -> None:
        """So many windows ran with `levels` [layers * experts]. Raises SideFileError where the disk is full."""
        moved = levels != self._last
        if moved.any():
            to = [np.flatnonzero(moved & (levels == level)).tolist() for level in range(self._tiers)]
            self._write(_Change(window=self._windows, to=to))
            self._last = levels.copy()
        self._windows += windows

    def close(self) -> None:
        """Write the end; further calls do nothing."""
        if not self._file.closed:
            self._write(_End(windows=self._windows))
            self._file.close()

    def _write(self, line: BaseModel) -> None:
        try:
            self._file.write(line.model_dump_json() + "\n")
        except OSError as error:
            raise SideFileError(f"cannot write {self._path}: {error.strerror or error}") from error


class RecordedMap:
    """The map of an earlier run, window by window."""

    def __init__(self, path: Path, head: MapHead, changes: list[_Change], windows: int) -> None:
        self.head, self.windows = head, windows
        self._path = path
        self._maps = self._replay(changes)

    @classmethod
    def load(cls, path: Path, fingerprint: str, tiers: tuple[str, ...], shape: ModelShape) -> RecordedMap:
        """Read a map of this model at these tiers.

        Raises:
            SideFileError: missing, damaged, without an end, or of something else.
        """
        try:
            with path.open(encoding="utf-8") as file:
                lines = [json.loads(line) for line in iter(lambda: file.readline(MAX_LINE_BYTES), "")]
            head = MapHead.model_validate(lines[0])
            end = _End.model_validate(lines[-1])
            changes = [_Change.model_validate(line) for line in lines[1:-1]]
            if any(len(change.to) != len(head.tiers) for change in changes) or len(head.slots) != len(head.tiers) - 1:
                raise ValueError("its lines do not fit its head")
            if any(len({*chain(*change.to)}) != sum(map(len, change.to)) for change in changes):
                raise ValueError("an expert comes to two tiers at once")
        except OSError as error:
            raise SideFileError(f"cannot read the version map {path}: {error.strerror or error}") from error
        except (ValueError, ValidationError, IndexError) as error:
            raise SideFileError(f"{path} is no whole version map, as --record-map makes them") from error
        if (head.fingerprint, head.layers, head.experts) != (fingerprint, shape.layers, shape.experts):
            raise SideFileError(f"{path} is the version map of another model")
        if head.tiers != tiers:
            raise SideFileError(
                f"{path} was recorded at {' and '.join(head.tiers)}, this run has {' and '.join(tiers)}; "
                "give the same --high, --low, --expert-memory and slots"
            )
        return cls(path, head, changes, end.windows)

    def check_slots(self, slots: tuple[int, ...]) -> None:
        """Raise SideFileError unless every recorded map fits into `slots`, from the highest tier down."""
        if any(recorded > here for recorded, here in zip(self.head.slots, slots, strict=True)):
            raise SideFileError(
                f"{self._path} was recorded with {_slots_text(self.head.tiers, self.head.slots)}, this run has "
                f"{_slots_text(self.head.tiers, slots)}; give the same --expert-memory"
            )

    def next(self) -> Levels:
        """Levels [layers * experts] of the next window. Raises SideFileError past the end."""
        try:
            return next(self._maps)
        except StopIteration:
            raise SideFileError(
                f"{self._path} ends after {self.windows} windows, and this run goes on; repeat the run it was made by"
            ) from None

    def _replay(self, changes: list[_Change]) -> Iterator[Levels]:
        levels = _all_low(self.head)
        coming = iter([*changes, None])
        change = next(coming)
        for window in range(self.windows):
            if change is not None and change.window == window:
                try:
                    for level, numbers in enumerate(change.to):
                        levels[numbers] = level
                except IndexError as error:
                    raise SideFileError(f"{self._path}: window {window} names an expert that is not there") from error
                change = next(coming)
            yield levels.copy()


def _slots_text(tiers: tuple[str, ...], slots: tuple[int, ...]) -> str:
    return ", ".join(f"{count} experts at {tier}" for count, tier in zip(slots, tiers, strict=False))


def _all_low(head: MapHead) -> Levels:
    return np.full(head.layers * head.experts, len(head.tiers) - 1)
