"""Preparation: stream a checkpoint's experts into a store, one expert in memory, resumable at any point."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from dynaexq.core import ModelShape, OptionError, StoreError, round_up
from dynaexq.formats import DEFAULT_QUANTIZER, QUANTIZERS, VersionLayout, tier_format
from dynaexq.formats.base import DEFAULT_GROUP_SIZE, with_bases
from dynaexq.formats.quantizers import CALIBRATED
from dynaexq.store.checkpoint import INDEX_NAME, Checkpoint
from dynaexq.store.dense import verify_dense, write_dense
from dynaexq.store.files import LOCK_NAME, PARTIAL_SUFFIX, file_checksum, lock_directory, replace_atomically, write_all
from dynaexq.store.layer_file import layer_path
from dynaexq.store.manifest import MANIFEST_NAME, Manifest
from dynaexq.store.sources import Calibration, ExpertSource, Progress
from dynaexq.store.tier_writer import prepare_tiers

COPIED_SUFFIXES = {".json", ".jinja", ".model", ".txt"}
QUANT_METHOD = "dynaexq"


@dataclass(frozen=True)
class PrepareOptions:
    """What to put into a store; `quantizer` is for versions that are not fitted to a calibration."""

    tiers: tuple[str, ...]
    group_size: int = DEFAULT_GROUP_SIZE
    quantizer: str = DEFAULT_QUANTIZER

    def check(self, shape: ModelShape) -> None:
        """Raise OptionError where the options are unknown or do not fit the model."""
        if not self.tiers:
            raise OptionError("no tier given")
        if len(set(self.tiers)) != len(self.tiers):
            raise OptionError(f"a tier is given twice: {', '.join(self.tiers)}")
        if self.quantizer not in QUANTIZERS:
            raise OptionError(f"unknown quantizer '{self.quantizer}'; known quantizers are {', '.join(QUANTIZERS)}")
        for tier in self.tiers:
            VersionLayout.of(tier_format(tier, self.group_size), shape.expert)


def prepare_store(
    source: ExpertSource,
    root: Path,
    options: PrepareOptions,
    progress: Progress,
    wait_for_lock: bool = False,
    calibration: Calibration | None = None,
) -> Manifest:
    """Create, resume or extend the store in `root`; versions below 8 bits are fitted to `calibration`, if there is one.

    What an earlier run finished is checked against its checksums and kept; damaged layers are made again.

    Raises:
        OptionError: unfit options, or `root` holds something else.
        StoreError: `root` is a store of another checkpoint, or cannot be written.
        CheckpointError: a tensor is unreadable or not finite.
    """
    options.check(source.shape)
    tiers = with_bases(options.tiers)
    wanted = _manifest(source, options, calibration)
    check_target(root, wanted)
    try:
        (root / "experts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot create {root}: {error.strerror or error}") from error
    on_wait = (lambda: progress("waiting for another process that prepares it", 0, 0)) if wait_for_lock else None
    with lock_directory(root, on_wait):
        manifest = check_target(root, wanted) or wanted
        remove_partial_files(root)
        _check_space(manifest, source, root, tiers)
        manifest.save(root)
        manifest = manifest.model_copy(update={"files": _copy_side_files(source.checkpoint, root)})
        manifest = _prepare_dense(manifest, source, root, progress)
        manifest = prepare_tiers(manifest, source, root, tiers, progress, calibration)
        manifest.save(root)
    return manifest


def _manifest(source: ExpertSource, options: PrepareOptions, calibration: Calibration | None) -> Manifest:
    return Manifest(
        source=source.checkpoint.root.name,
        fingerprint=source.checkpoint.fingerprint(),
        model_type=str(source.checkpoint.config.get("model_type")),
        layer_names=source.layer_names,
        experts=source.shape.experts,
        hidden=source.shape.expert.hidden,
        intermediate=source.shape.expert.intermediate,
        group_size=options.group_size,
        quantizer=f"{CALIBRATED}-{calibration.identity}" if calibration else options.quantizer,
        calibrated_on=calibration.texts if calibration else (),
    )


def check_target(root: Path, wanted: Manifest) -> Manifest | None:
    """The manifest already in `root`, None if the directory is free to use.

    Raises:
        OptionError: `root` holds something else, or was prepared with other options.
        StoreError: `root` is a store of another checkpoint.
    """
    try:
        if not root.exists():
            return None
    except OSError as error:
        raise OptionError(f"{root} is no usable directory name: {error.strerror}") from error
    if not root.is_dir():
        raise OptionError(f"{root} exists and is not a directory")
    if not (root / MANIFEST_NAME).exists():
        ours = (LOCK_NAME, "experts")
        foreign = [p.name for p in root.iterdir() if p.name not in ours and not p.name.endswith(PARTIAL_SUFFIX)]
        if foreign:
            raise OptionError(
                f"{root} is not empty (it holds {sorted(foreign)[0]}) and not a store; give a new directory"
            )
        return None
    found = Manifest.load(root)
    if found.fingerprint != wanted.fingerprint:
        raise StoreError(
            f"{root} is a store of another checkpoint ('{found.source}'), or of a synthetic one with other "
            "layers, vocabulary, routing or seed; give a new directory"
        )
    if found.quantizer != wanted.quantizer and (found.calibrated_on or wanted.calibrated_on):
        raise OptionError(
            f"{root} was prepared {_describe_calibration(found)}, not {_describe_calibration(wanted)}; do the same, or "
            "give a new directory"
        )
    for name in ("group_size", "quantizer"):
        have, want = getattr(found, name), getattr(wanted, name)
        if have != want:
            option = name.replace("_", "-")
            raise OptionError(f"{root} was prepared with --{option} {have}, not {want}; use that or a new directory")
    return found


def _describe_calibration(manifest: Manifest) -> str:
    if not manifest.calibrated_on:
        return "without --calibration"
    return f"with --calibration by the inputs of {', '.join(manifest.calibrated_on)} ({manifest.quantizer})"


def remove_partial_files(root: Path) -> None:
    """Sweep up what a killed run left half-written; the lock says nobody is writing now."""
    for partial in root.rglob(f"*{PARTIAL_SUFFIX}"):
        partial.unlink()


def _check_space(manifest: Manifest, source: ExpertSource, root: Path, tiers: tuple[str, ...]) -> None:
    extents = [VersionLayout.of(manifest.format(tier), manifest.shape.expert).extent_bytes for tier in tiers]
    missing = [
        extent * manifest.experts
        for tier, extent in zip(tiers, extents, strict=True)
        for layer in range(manifest.shape.layers)
        if not layer_path(root, layer, tier).exists()
    ]
    dense = 0 if manifest.dense else sum(source.checkpoint.tensors[name].nbytes for name in source.dense_names)
    need, free = round_up(sum(missing) + dense, 4096), shutil.disk_usage(root).free
    if need > free:
        raise StoreError(
            f"the disk of {root} has {free} bytes free, the store needs {need} more; make space or choose fewer tiers"
        )


def _copy_side_files(checkpoint: Checkpoint, root: Path) -> dict[str, int]:
    """Tokenizer and generation files as they are; config.json with our quantization_config. Returns their checksums."""
    written = ["config.json"]
    for path in sorted(checkpoint.root.iterdir()):
        if (
            path.suffix in COPIED_SUFFIXES
            and path.name not in ("config.json", INDEX_NAME, MANIFEST_NAME)
            and path.is_file()
        ):
            with replace_atomically(root / path.name) as descriptor:
                write_all(descriptor, path.read_bytes())
            written.append(path.name)
    config = {**checkpoint.config, "quantization_config": {"quant_method": QUANT_METHOD}}
    with replace_atomically(root / "config.json") as descriptor:
        write_all(descriptor, json.dumps(config, indent=2).encode())
    return {name: file_checksum(root / name) for name in sorted(written)}


def _prepare_dense(manifest: Manifest, source: ExpertSource, root: Path, progress: Progress) -> Manifest:
    if manifest.dense:
        with contextlib.suppress(StoreError):
            verify_dense(root, manifest.dense)
            return manifest
    total = sum(source.checkpoint.tensors[name].nbytes for name in source.dense_names)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress("dense weights", done, total)

    dense = write_dense(source.checkpoint, source.dense_names, root, advance)
    manifest = manifest.model_copy(update={"dense": dense})
    manifest.save(root)
    return manifest
