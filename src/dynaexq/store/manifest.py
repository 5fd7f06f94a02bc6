"""The manifest of a store: what it was made from and which tiers are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dynaexq.core import ExpertShape, ModelShape, StoreError
from dynaexq.formats import LAYOUT_ID, ExpertFormat, tier_format
from dynaexq.formats.base import GROUP_SIZES
from dynaexq.store.files import replace_atomically, write_all

MANIFEST_NAME = "dynaexq.json"
STORE_VERSION = 1
DENSE_NAME = "model.safetensors"

Measured = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TierInfo(BaseModel):
    """One complete tier. Errors are relative weight errors (Frobenius) over experts."""

    model_config = ConfigDict(extra="forbid")
    payload_bytes: int
    extent_bytes: int
    error_mean: float
    error_max: float


class DenseInfo(BaseModel):
    """The file with all weights that are not experts."""

    model_config = ConfigDict(extra="forbid")
    nbytes: int
    crc32c: int


class CalibrationInfo(BaseModel):
    """What calibration texts say of layers and experts, whatever their versions.

    `sensitivity` [layers] is in nats per token for every unit of noise energy per token in what a layer's experts put
    out; `selections` and `peaks` [layers][experts]: how often a token chooses an expert, and the largest absolute value
    in what it makes of its tokens.
    """

    model_config = ConfigDict(extra="forbid")
    sensitivity: list[Measured]
    selections: list[list[Measured]]
    peaks: list[list[Measured]]


class Manifest(BaseModel):
    """Contents of `dynaexq.json`. Tiers appear when their last layer is on disk."""

    model_config = ConfigDict(extra="forbid")
    store_version: int = STORE_VERSION
    layout: str = LAYOUT_ID
    source: str
    fingerprint: str
    model_type: str
    layer_names: list[str]
    experts: int = Field(gt=0)
    hidden: int = Field(gt=0)
    intermediate: int = Field(gt=0)
    group_size: int
    quantizer: str
    calibrated_on: tuple[str, ...] = ()
    """Texts whose inputs versions were fitted to, for people."""
    calibration: CalibrationInfo | None = None
    dense: DenseInfo | None = None
    files: dict[str, int] = {}
    """CRC-32C of configuration and tokenizer files by name."""
    tiers: dict[str, TierInfo] = {}

    @field_validator("group_size")
    @classmethod
    def _known_group_size(cls, value: int) -> int:
        if value not in GROUP_SIZES:
            raise ValueError(f"unknown group size {value}")
        return value

    @model_validator(mode="after")
    def _calibration_of_this_model(self) -> Manifest:
        info, layers = self.calibration, len(self.layer_names)
        if info and any(len(each) != layers for each in (info.sensitivity, info.selections, info.peaks)):
            raise ValueError(f"the calibration is not one of {layers} layers")
        if info and any(len(each) != self.experts for each in (*info.selections, *info.peaks)):
            raise ValueError(f"the calibration is not one of {self.experts} experts a layer")
        return self

    @property
    def shape(self) -> ModelShape:
        return ModelShape(len(self.layer_names), self.experts, ExpertShape(self.hidden, self.intermediate))

    @property
    def calibration_option(self) -> str:
        """What a command that goes on with the store must say, for people."""
        return f" --calibration INPUTS_OF_{'+'.join(self.calibrated_on)}" if self.calibrated_on else ""

    def format(self, tier: str) -> ExpertFormat:
        """Format of `tier` at the store's group size."""
        return tier_format(tier, self.group_size)

    def save(self, root: Path) -> None:
        """Write the manifest, atomically. Raises StoreError."""
        with replace_atomically(root / MANIFEST_NAME) as descriptor:
            write_all(descriptor, self.model_dump_json(indent=2).encode())

    @classmethod
    def load(cls, root: Path) -> Manifest:
        """Read and check the manifest of the store in `root`.

        Raises:
            StoreError: missing, damaged, or of another version or layout.
        """
        path = root / MANIFEST_NAME
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise StoreError(f"{root} is not a store: {MANIFEST_NAME} is missing") from None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
        try:
            version = _Version.model_validate_json(text)
            if version.store_version != STORE_VERSION or version.layout != LAYOUT_ID:
                raise StoreError(
                    f"{path} has store version {version.store_version} and layout {version.layout}; this program "
                    f"reads {STORE_VERSION} and {LAYOUT_ID}. Prepare the model again into a new directory"
                )
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise StoreError(f"{path} is damaged: {where}: {first['msg']}") from error


class _Version(BaseModel):
    store_version: int
    layout: str
