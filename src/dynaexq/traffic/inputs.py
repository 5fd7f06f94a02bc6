"""What experts were given by calibration texts: each MoE layer's inputs and routing, a safetensors file a layer.

`inputs.json` is written last and names the files' checksums: a directory without it is no calibration.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load

from dynaexq.core import ModelShape, OptionError, SideFileError
from dynaexq.native import crc32c
from dynaexq.store.files import header_bytes, replace_atomically, write_all, write_error

INPUTS_VERSION = 2
INPUTS_NAME = "inputs.json"
MAX_HEAD_BYTES = 16 << 20
FIELDS = {"hidden": ("BF16", torch.bfloat16), "ids": ("I32", torch.int32), "weights": ("F32", torch.float32)}


class LayerInputs(NamedTuple):
    """Of one MoE layer: hidden bfloat16 [tokens, hidden], ids int32 and weights float32 [tokens, top_k]."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


class _Head(BaseModel):
    model_config = ConfigDict(extra="forbid")
    expert_inputs: int = INPUTS_VERSION
    fingerprint: str
    layers: int = Field(gt=0)
    experts: int = Field(gt=0)
    hidden: int = Field(gt=0)
    top_k: int = Field(gt=0)
    tokens: int = Field(gt=0)
    tier: str
    texts: list[str]
    sensitivity: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    crc32c: list[int]


class _Version(BaseModel):
    expert_inputs: int


def check_inputs_target(root: Path, force: bool) -> None:
    """Raise OptionError unless `root` is free, or holds an earlier calibration and `force` says to replace it."""
    if not root.exists():
        return
    if not root.is_dir():
        raise OptionError(f"{root} exists and is not a directory")
    foreign = [each.name for each in root.iterdir() if each.name != INPUTS_NAME and not _is_layer_name(each.name)]
    if foreign:
        raise OptionError(f"{root} is not empty (it holds {sorted(foreign)[0]}); give a new directory")
    if (root / INPUTS_NAME).exists() and not force:
        raise OptionError(f"{root} holds a calibration; --force replaces it")


class InputsWriter:
    """Writes the inputs of `tokens` tokens as they come, layer by layer in every forward pass."""

    def __init__(self, root: Path, fingerprint: str, shape: ModelShape, tokens: int) -> None:
        self._root, self._fingerprint, self._shape, self._tokens = root, fingerprint, shape, tokens
        self._top_k = 0
        self._starts: dict[str, int] = {}
        self._files: list[io.FileIO] = []
        self._done = [0] * shape.layers

    def _create(self, top_k: int) -> None:
        """Make the files, of their final size. Raises SideFileError where there is no room for them."""
        self._top_k = top_k
        widths = {"hidden": self._shape.expert.hidden, "ids": top_k, "weights": top_k}
        header, position = {}, 0
        for name, (code, dtype) in FIELDS.items():
            self._starts[name], end = position, position + self._tokens * widths[name] * dtype.itemsize
            header[name] = {"dtype": code, "shape": [self._tokens, widths[name]], "data_offsets": [position, end]}
            position = end
        head = header_bytes(header)
        self._starts = {name: len(head) + start for name, start in self._starts.items()}
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            (self._root / INPUTS_NAME).unlink(missing_ok=True)
            need, free = (len(head) + position) * self._shape.layers, shutil.disk_usage(self._root).free
            if need > free:
                raise SideFileError(
                    f"the disk of {self._root} has {free} bytes free, the inputs of {self._tokens} tokens need {need}; "
                    "make space, or take fewer (--max-tokens)"
                )
            for layer in range(self._shape.layers):
                file = io.FileIO(self._root / _layer_name(layer), "w+")
                self._files.append(file)
                file.write(head)
                file.truncate(len(head) + position)
        except OSError as error:
            raise write_error(self._root, error) from error

    def add(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Note what a pass gave the experts of `layer`: [tokens, hidden] and [tokens, top_k]. Raises StoreError."""
        if not self._files:
            self._create(ids.shape[1])
        done = self._done[layer]
        for name, tensor in zip(FIELDS, (hidden, ids, weights), strict=True):
            rows = tensor.detach().to(FIELDS[name][1]).contiguous()
            start = self._starts[name] + done * rows.shape[1] * rows.itemsize
            data = memoryview(rows.view(torch.uint8).numpy().tobytes())
            try:
                while data:
                    written = os.pwrite(self._files[layer].fileno(), data, start)
                    data, start = data[written:], start + written
            except OSError as error:
                raise write_error(self._root / _layer_name(layer), error) from error
        self._done[layer] += len(hidden)

    def finish(self, tier: str, texts: list[str], sensitivity: list[float]) -> None:
        """All is there: say so. `tier`: of the experts that ran, for people; `sensitivity`: see ExpertInputs."""
        assert set(self._done) == {self._tokens}
        self.close()
        checksums = [_checksum((self._root / _layer_name(layer)).read_bytes()) for layer in range(self._shape.layers)]
        head = _Head(
            fingerprint=self._fingerprint,
            layers=self._shape.layers,
            experts=self._shape.experts,
            hidden=self._shape.expert.hidden,
            top_k=self._top_k,
            tokens=self._tokens,
            tier=tier,
            texts=texts,
            sensitivity=sensitivity,
            crc32c=checksums,
        )
        with replace_atomically(self._root / INPUTS_NAME) as descriptor:
            write_all(descriptor, head.model_dump_json(indent=2).encode())

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


class ExpertInputs:
    """A calibration on disk; a layer is checked as it is read."""

    def __init__(self, root: Path, head: _Head) -> None:
        self.root, self._head = root, head

    @classmethod
    def open(cls, root: Path, fingerprint: str, shape: ModelShape) -> ExpertInputs:
        """The calibration in `root`. Raises SideFileError: missing, damaged, or of another model."""
        path = root / INPUTS_NAME
        try:
            if path.stat().st_size > MAX_HEAD_BYTES:
                raise SideFileError(f"{path} is larger than {MAX_HEAD_BYTES >> 20} MiB: no calibration")
            text = path.read_bytes()
            version = _Version.model_validate_json(text).expert_inputs
            if version != INPUTS_VERSION:
                raise SideFileError(
                    f"{path} is of version {version}, this program reads {INPUTS_VERSION}; calibrate again "
                    "(`dynaexq calibrate`)"
                )
            head = _Head.model_validate_json(text)
        except (FileNotFoundError, NotADirectoryError):
            raise SideFileError(
                f"{root} is no directory of a finished calibration; "
                f"make one: `dynaexq calibrate MODEL --text FILE --inputs {root}`"
            ) from None
        except OSError as error:
            raise SideFileError(f"cannot read {path}: {error.strerror or error}") from error
        except ValidationError as error:
            raise SideFileError(f"{path} is damaged: {error.errors()[0]['msg']}") from error
        found = head.fingerprint, head.layers, head.experts, head.hidden, len(head.crc32c), len(head.sensitivity)
        if found != (fingerprint, shape.layers, shape.experts, shape.expert.hidden, shape.layers, shape.layers):
            raise SideFileError(f"{root} is the calibration of another model; make one of this (`dynaexq calibrate`)")
        return cls(root, head)

    def verify(self, progress: Callable[[int, int], None]) -> None:
        """Read all of it; `progress(layers read, all)`. Raises SideFileError where it is not as it was written."""
        for layer in range(self._head.layers):
            self.layer(layer)
            progress(layer + 1, self._head.layers)

    @property
    def identity(self) -> str:
        """Of the inputs, for the stores made with them."""
        return f"{_checksum(self._head.model_dump_json().encode()):08x}"

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the texts, for people."""
        return tuple(self._head.texts)

    @property
    def sensitivity(self) -> tuple[float, ...]:
        """[layers]: nats per token for every unit of noise energy per token in what a layer's experts put out."""
        return tuple(self._head.sensitivity)

    def layer(self, layer: int) -> LayerInputs:
        """Inputs of one MoE layer. Raises SideFileError where they are not as they were written."""
        path = self.root / _layer_name(layer)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SideFileError(f"cannot read {path}: {error.strerror or error}") from error
        if _checksum(data) != self._head.crc32c[layer]:
            raise SideFileError(f"{path} is damaged: its checksum is wrong; calibrate again")
        tensors = load(data)
        if not all(bool(tensors[name].isfinite().all()) for name in ("hidden", "weights")):
            raise SideFileError(f"{path} holds values that are not finite: the model does not compute; see its weights")
        return LayerInputs(**{name: tensors[name] for name in FIELDS})


def _layer_name(layer: int) -> str:
    return f"inputs-{layer:04d}.safetensors"


def _is_layer_name(name: str) -> bool:
    return name.startswith("inputs-") and name.endswith(".safetensors")


def _checksum(data: bytes) -> int:
    return crc32c(np.frombuffer(data, np.uint8))
