"""Reading a store: every extent is checked against its checksum as it arrives."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from dynaexq.core import ExpertKey, ModelShape, StoreError
from dynaexq.formats import LAYOUT_ID, ExpertFormat, VersionLayout
from dynaexq.formats.base import base_tier
from dynaexq.native import read_extent
from dynaexq.store.dense import verify_dense
from dynaexq.store.files import file_checksum
from dynaexq.store.layer_file import LayerFile, LayerIdentity, damaged_extents, layer_path, open_layer
from dynaexq.store.manifest import DENSE_NAME, Manifest
from dynaexq.store.sensitivity import Sensitivity, make_sensitivity


def identity_of(manifest: Manifest, layer: int, tier: str) -> LayerIdentity:
    """What the file of (`layer`, `tier`) must say about itself."""
    return LayerIdentity(
        manifest.fingerprint,
        LAYOUT_ID,
        manifest.layer_names[layer],
        tier,
        manifest.group_size,
        manifest.quantizer,
    )


def open_tier(root: Path, manifest: Manifest, layer: int, tier: str) -> LayerFile:
    """The file of (`layer`, `tier`), its header checked; of a nested tier, that it refines the versions that are there.

    Raises:
        StoreError: missing, damaged, made for something else, or for other versions than those of its base.
    """
    extent_bytes = VersionLayout.of(manifest.format(tier), manifest.shape.expert).extent_bytes
    path = layer_path(root, layer, tier)
    file = open_layer(path, identity_of(manifest, layer, tier), manifest.experts, extent_bytes)
    if file.bases != (base_checksums(manifest, root, layer, tier) or []):
        raise StoreError(
            f"{path} refines other {base_tier(tier)} versions than those of the store; run `dynaexq prepare` (or "
            "`synth`) again to restore both"
        )
    return file


def base_checksums(manifest: Manifest, root: Path, layer: int, tier: str) -> list[int] | None:
    """Checksums of the versions that those of (`layer`, `tier`) refine; None where they stand alone."""
    base = base_tier(tier)
    return None if base is None else open_tier(root, manifest, layer, base).checksums


class ExpertStore:
    """An opened store. Thread-safe for reads after `require_tier`."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root = root
        self.manifest = manifest
        self.direct_io = True
        self._files: dict[tuple[int, str], tuple[LayerFile, int]] = {}

    @classmethod
    def open(cls, root: Path) -> ExpertStore:
        """Open the store in `root`. Raises StoreError when it is no complete store."""
        manifest = Manifest.load(root)
        if not manifest.tiers or manifest.dense is None:
            raise StoreError(
                f"{root} was not prepared to the end; run `dynaexq prepare` (or `synth`) again, "
                "it goes on where it stopped"
            )
        dense = root / DENSE_NAME
        if not dense.is_file() or dense.stat().st_size != manifest.dense.nbytes:
            raise StoreError(f"{dense} is missing or cut short; run `dynaexq prepare` (or `synth`) again to restore it")
        return cls(root, manifest)

    @property
    def shape(self) -> ModelShape:
        return self.manifest.shape

    @property
    def fingerprint(self) -> str:
        """Of the checkpoint the store was made from."""
        return self.manifest.fingerprint

    def format(self, tier: str) -> ExpertFormat:
        """Format of a tier of this store."""
        return self.manifest.format(tier)

    def require_tier(self, tier: str) -> None:
        """Open every layer file of `tier`. Raises StoreError when one is missing or unfit."""
        if tier not in self.manifest.tiers:
            raise StoreError(
                f"{self.root} has no tier {tier} (it has {', '.join(self.manifest.tiers)}); "
                f"add it with `dynaexq prepare MODEL -o {self.root} --tiers {tier}{self.manifest.calibration_option}`"
            )
        for layer in range(self.shape.layers):
            if (layer, tier) not in self._files:
                file = self._open_layer(layer, tier)
                self._files[layer, tier] = file, self._open_descriptor(file.path)

    def read_into(self, key: ExpertKey, tier: str, destination: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Fill `destination` (uint8 [extent_bytes], 4 KiB-aligned) with the version of `key` in `tier`.

        Raises:
            StoreError: the read failed, or the bytes do not match their checksum.
        """
        file, descriptor = self._files[key.layer, tier]
        position = file.position(key.expert)
        try:
            done, checksum = read_extent(descriptor, position, destination)
            if not self.direct_io:
                os.posix_fadvise(descriptor, position, file.extent_bytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise StoreError(f"cannot read {file.path}: {error.strerror or error}") from error
        if done != file.extent_bytes or checksum != file.checksums[key.expert]:
            raise StoreError(
                f"{file.path} is damaged: the bytes of expert {key.expert} (layer {key.layer}) do not match their "
                "checksum; run `dynaexq prepare` (or `synth`) again to restore it"
            )

    def verify_dense(self) -> None:
        """Check the dense file. Raises StoreError."""
        assert self.manifest.dense is not None
        verify_dense(self.root, self.manifest.dense)

    def damaged_files(self) -> list[str]:
        """Side files (configuration, tokenizer) that are missing or not as they were prepared."""
        return [
            name
            for name, checksum in self.manifest.files.items()
            if not (self.root / name).is_file() or file_checksum(self.root / name) != checksum
        ]

    def damaged(self, layer: int, tier: str) -> list[int]:
        """Experts of a layer whose bytes are wrong. Raises StoreError when the file is unfit as a whole."""
        return damaged_extents(self._open_layer(layer, tier))

    def errors(self, tier: str) -> list[list[float]]:
        """Relative weight error of every version of `tier`: [layers][experts]."""
        return [self._open_layer(layer, tier).errors for layer in range(self.shape.layers)]

    @functools.cached_property
    def sensitivity(self) -> Sensitivity | None:
        """What versions lose in outputs; None where the store was not calibrated, or not at every tier.

        Raises StoreError.
        """
        if self.manifest.calibration is None:
            return None
        errors = {
            tier: [self._open_layer(layer, tier).output_errors for layer in range(self.shape.layers)]
            for tier in self.manifest.tiers
        }
        known = make_sensitivity(self.manifest.calibration, errors)
        if known is None:
            warnings.warn(
                f"{self.root} was calibrated, but does not say of every version what it loses, so layers get equal "
                "shares; `dynaexq prepare` with its --calibration again restores that",
                stacklevel=2,
            )
        return known

    def missing_files(self) -> list[str]:
        """Layer files in use that are no longer where they were opened."""

        def same(path: Path, descriptor: int) -> bool:
            try:
                return os.path.samestat(path.stat(), os.fstat(descriptor))
            except OSError:
                return False

        return [str(file.path) for file, descriptor in list(self._files.values()) if not same(file.path, descriptor)]

    def close(self) -> None:
        """Close the layer files."""
        while self._files:
            os.close(self._files.popitem()[1][1])

    def _open_layer(self, layer: int, tier: str) -> LayerFile:
        return open_tier(self.root, self.manifest, layer, tier)

    def _open_descriptor(self, path: Path) -> int:
        try:
            if self.direct_io:
                try:
                    return os.open(path, os.O_RDONLY | os.O_DIRECT)
                except OSError:
                    self.direct_io = False
                    warnings.warn(
                        f"the file system of {self.root} has no direct I/O: reads are buffered, and dropped after use",
                        stacklevel=2,
                    )
            return os.open(path, os.O_RDONLY)
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
