"""Hotness on disk: measured by `calibrate`, ranked by static maps and cold starts, gone on from by restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dynaexq.core import ModelShape, SideFileError
from dynaexq.native import crc32c
from dynaexq.store.files import replace_atomically, write_all
from dynaexq.traffic.own_files import check_own_file

PROFILE_VERSION = 1
MAX_PROFILE_BYTES = 256 << 20

Sums = np.ndarray[Any, np.dtype[np.float64]]


BEGINNING = b'{"traffic_profile":'
"""Of every profile that this program writes."""

MAX_HOTNESS = 1e15
"""More selections than a model can make; beyond it sums of hotness lose their meaning."""


def check_state_file(path: Path) -> None:
    """Raise OptionError unless `path` can become a state file."""
    check_own_file(path, "state", "traffic profile", BEGINNING)


class TrafficProfile(BaseModel):
    """Hotness of every expert of one model, [layers][experts], and where it came from.

    `fingerprint` is that of the checkpoint, so a profile serves every store made from it; `routed` is how many router
    selections it saw, `texts` says of what, for people.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    traffic_profile: int = PROFILE_VERSION
    fingerprint: str
    signal: str
    routed: int = Field(ge=0)
    texts: list[str] = []
    hotness: list[list[float]]
    crc32c: int

    @model_validator(mode="after")
    def _whole(self) -> TrafficProfile:
        if self.traffic_profile != PROFILE_VERSION:
            raise ValueError(f"version {self.traffic_profile}, this program reads {PROFILE_VERSION}")
        if len({len(row) for row in self.hotness}) != 1 or not self.hotness[0]:
            raise ValueError("its rows differ in length")
        sums = self.sums
        if (sums < 0).any() or (sums > MAX_HOTNESS).any():
            raise ValueError("hotness that is negative or beyond belief")
        if _checksum(sums) != self.crc32c:
            raise ValueError("its numbers do not match their checksum")
        return self

    @classmethod
    def of(cls, fingerprint: str, signal: str, sums: Sums, routed: int, texts: list[str]) -> TrafficProfile:
        """Wrap hotness [layers, experts]."""
        return cls(
            fingerprint=fingerprint,
            signal=signal,
            routed=routed,
            texts=texts,
            hotness=sums.tolist(),
            crc32c=_checksum(sums),
        )

    @property
    def sums(self) -> Sums:
        """Hotness as float64 [layers, experts]."""
        return np.array(self.hotness, np.float64)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises SideFileError."""
        with replace_atomically(path) as descriptor:
            write_all(descriptor, self.model_dump_json().encode())

    @classmethod
    def read(cls, path: Path) -> TrafficProfile:
        """Read a profile, whichever model it is of.

        Raises:
            SideFileError: missing or damaged.
        """
        try:
            if path.exists() and not path.is_file():
                raise SideFileError(f"{path} is no regular file: no traffic profile")
            if path.stat().st_size > MAX_PROFILE_BYTES:
                raise SideFileError(f"{path} is larger than {MAX_PROFILE_BYTES >> 20} MiB: no traffic profile")
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise SideFileError(f"cannot read the traffic profile {path}: {error.strerror or error}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise SideFileError(
                f"{path} is no whole traffic profile, as `dynaexq calibrate` makes them: "
                f"{where}{': ' * bool(where)}{first['msg']}"
            ) from error

    @classmethod
    def load(cls, path: Path, fingerprint: str, shape: ModelShape) -> TrafficProfile:
        """Read the profile of the model with this fingerprint and shape.

        Raises:
            SideFileError: missing, damaged, or of another model.
        """
        profile = cls.read(path)
        if profile.fingerprint != fingerprint or profile.sums.shape != (shape.layers, shape.experts):
            raise SideFileError(f"{path} is the traffic profile of another model; make one with `dynaexq calibrate`")
        return profile


def _checksum(sums: Sums) -> int:
    return crc32c(np.ascontiguousarray(sums, np.float64).reshape(-1).view(np.uint8))
