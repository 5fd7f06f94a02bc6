"""Trained predictors on disk: safetensors, with what they are of in the metadata."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from dynaexq.core import ModelShape, SideFileError
from dynaexq.native import crc32c
from dynaexq.policy.prediction import Matrix
from dynaexq.store.files import read_header, replace_atomically, write_all

PREDICTOR_NAME = "predictor.safetensors"
"""Of a store's own predictor."""

HEAD_KEY = "dynaexq_predictor"
VERSION = 1
MAX_BYTES = 1 << 30


class PredictorHead(BaseModel):
    """What a predictor is of.

    Args:
        fingerprint: of the checkpoint whose routing it learned; empty where the traces did not say.
        width, middle: numbers inside the corrector of a layer, and inside the window network.
        reach: layers that the corrector looks ahead, into the next pass where they go beyond the last.
        window, ahead: tokens that the window network looks back on, and passes that its chances are for.
        looks_back: whether the window network is asked: not where a moving average was as good.
        routers: whether the corrector is one of what the model's routers say; it is worth nothing without them.
        traces, tokens: what it was trained on.
        report: how good it is on what was held out, by name, for people.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    version: int = VERSION
    fingerprint: str = Field(max_length=100)
    layers: int = Field(gt=0)
    experts: int = Field(gt=0)
    hidden: int = Field(gt=0)
    top_k: int = Field(gt=0)
    width: int = Field(gt=0)
    middle: int = Field(gt=0)
    reach: int = Field(gt=0)
    window: int = Field(gt=0)
    ahead: int = Field(gt=0)
    routers: bool
    looks_back: bool = True
    traces: list[str] = []
    tokens: int = 0
    report: dict[str, float] = {}
    crc32c: int = 0

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all tensors."""
        size, chances = self.layers * self.experts, self.reach * self.experts
        given = 2 * self.hidden + size
        return {
            "corrector.down": (self.layers, self.width, self.hidden),
            "corrector.up": (self.layers, chances, self.width),
            "corrector.bias": (self.layers, chances),
            "corrector.scale": (self.layers, self.reach),
            "window.first": (self.middle, given),
            "window.first_bias": (self.middle,),
            "window.second": (self.middle, self.middle),
            "window.second_bias": (self.middle,),
            "window.third": (size, self.middle),
            "window.third_bias": (size,),
            "window.trust": (size,),
            "window.mean": (given,),
            "window.spread": (given,),
        }


class PredictorFile(NamedTuple):
    """A trained predictor: float32 tensors, with the names and shapes that its head says."""

    head: PredictorHead
    tensors: dict[str, Matrix]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises StoreError."""
        head = self.head.model_copy(update={"crc32c": _checksum(self.tensors)})
        payload = save(self.tensors, {HEAD_KEY: head.model_dump_json()})
        with replace_atomically(path) as descriptor:
            write_all(descriptor, payload)


def load_predictor(path: Path, fingerprint: str, shape: ModelShape) -> PredictorFile:
    """Read a predictor for a model. Raises SideFileError where it is missing, damaged, or of another model."""
    found = read_predictor(path)
    head = found.head
    same = (head.layers, head.experts, head.hidden) == (shape.layers, shape.experts, shape.expert.hidden)
    if not same or head.fingerprint not in ("", fingerprint):
        raise SideFileError(
            f"{path} is a predictor of another model: {head.layers} layers of {head.experts} experts, {head.hidden} "
            "wide; train one"
        )
    return found


def read_predictor(path: Path) -> PredictorFile:
    """Read a predictor. Raises SideFileError where it is missing or damaged."""
    try:
        if not path.is_file():
            raise SideFileError(f"{path}: not there, or no regular file; `dynaexq predictor train` makes predictors")
        if path.stat().st_size > MAX_BYTES:
            raise SideFileError(f"{path} is too large for a predictor")
        header, _, _ = read_header(path, SideFileError)
        head = PredictorHead.model_validate_json(header["__metadata__"][HEAD_KEY])
        tensors = load_file(path)
    except (OSError, KeyError, TypeError, SafetensorError, ValidationError) as error:
        raise SideFileError(f"{path} is no predictor that this program reads; train it again") from error
    whole = head.version == VERSION and {name: each.shape for name, each in tensors.items()} == head.shapes
    if not whole or any(each.dtype != np.float32 for each in tensors.values()):
        raise SideFileError(f"{path} is no whole predictor of version {VERSION}; train it again")
    if _checksum(tensors) != head.crc32c:
        raise SideFileError(f"{path} is damaged: its numbers do not match their checksum; train it again")
    return PredictorFile(head, tensors)


def _checksum(tensors: dict[str, Matrix]) -> int:
    found = 0
    for name in sorted(tensors):
        found = crc32c(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8), found)
    return found
