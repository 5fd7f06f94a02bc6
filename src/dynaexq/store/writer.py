"""Preparation: stream a checkpoint's experts into a store, one expert in memory, resumable at any point."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dynaexq.core import CheckpointError, ExpertKey, FormatError, ModelShape, OptionError, StoreError, round_up
from dynaexq.formats import DEFAULT_QUANTIZER, QUANTIZERS, ExpertWeights, VersionLayout, encode, tier_format
from dynaexq.formats.base import DEFAULT_GROUP_SIZE, base_tier, with_bases
from dynaexq.formats.codec import Base, ExpertMetrics, encode_nested
from dynaexq.formats.quantizers import CALIBRATED
from dynaexq.store.checkpoint import INDEX_NAME, Checkpoint
from dynaexq.store.dense import verify_dense, write_dense
from dynaexq.store.files import LOCK_NAME, PARTIAL_SUFFIX, file_checksum, lock_directory, replace_atomically, write_all
from dynaexq.store.layer_file import damaged_extents, layer_path, read_extent_of, write_layer
from dynaexq.store.manifest import MANIFEST_NAME, Manifest, TierInfo
from dynaexq.store.reader import identity_of, open_tier

COPIED_SUFFIXES = {".json", ".jinja", ".model", ".txt"}
QUANT_METHOD = "dynaexq"


class ExpertSource(Protocol):
    """Where experts come from: a checkpoint whose expert tensors are understood."""

    checkpoint: Checkpoint
    shape: ModelShape
    layer_names: list[str]
    dense_names: list[str]

    def read(self, key: ExpertKey) -> ExpertWeights:
        """Weights of one expert. Raises CheckpointError."""


class Calibration(Protocol):
    """What experts were given by calibration texts."""

    identity: str
    texts: tuple[str, ...]

    def metrics(self, key: ExpertKey, weights: ExpertWeights) -> ExpertMetrics:
        """What errors in the matrices of an expert matter. Raises SideFileError or CheckpointError."""


Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes or experts done, total)."""


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
        _check_space(manifest, source, root, options)
        manifest.save(root)
        manifest = manifest.model_copy(update={"files": _copy_side_files(source.checkpoint, root)})
        manifest = _prepare_dense(manifest, source, root, progress)
        manifest = _prepare_tiers(manifest, source, root, options.tiers, progress, calibration)
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


def _check_space(manifest: Manifest, source: ExpertSource, root: Path, options: PrepareOptions) -> None:
    extents = [VersionLayout.of(manifest.format(tier), manifest.shape.expert).extent_bytes for tier in options.tiers]
    missing = [
        extent * manifest.experts
        for tier, extent in zip(options.tiers, extents, strict=True)
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


def _prepare_tiers(
    manifest: Manifest,
    source: ExpertSource,
    root: Path,
    tiers: tuple[str, ...],
    progress: Progress,
    calibration: Calibration | None,
) -> Manifest:
    total = manifest.shape.layers * manifest.experts
    tiers = with_bases(tiers)
    for layer in range(manifest.shape.layers):
        for nested in (False, True):  # what is nested is made for the base that is on disk
            chosen = [tier for tier in tiers if bool(base_tier(tier)) is nested]
            missing = [tier for tier in chosen if not is_intact(manifest, root, layer, tier)]
            if missing:
                _write_layer_tiers(manifest, source, root, layer, missing, progress, calibration)
        progress("experts", (layer + 1) * manifest.experts, total)
    return manifest.model_copy(
        update={"tiers": {**manifest.tiers, **{tier: describe_tier(manifest, root, tier) for tier in tiers}}}
    )


def _write_layer_tiers(
    manifest: Manifest,
    source: ExpertSource,
    root: Path,
    layer: int,
    tiers: list[str],
    progress: Progress,
    calibration: Calibration | None,
) -> None:
    """Read every expert of a layer once and encode it into all `tiers`."""
    shape = manifest.shape.expert
    fitted = calibration is not None and any(_is_fitted(tier) for tier in tiers)
    with contextlib.ExitStack() as stack:
        writers = {}
        for tier in tiers:
            extent_bytes = VersionLayout.of(manifest.format(tier), shape).extent_bytes
            identity = identity_of(manifest, layer, tier)
            path = layer_path(root, layer, tier)
            add = stack.enter_context(write_layer(path, identity, manifest.experts, extent_bytes))
            base = base_tier(tier)
            writers[tier] = add, open_tier(root, manifest, layer, base) if base else None
        for expert in range(manifest.experts):
            key = ExpertKey(layer, expert)
            weights = source.read(key)
            metrics = calibration.metrics(key, weights) if calibration and fitted else None
            for tier, (add, base_file) in writers.items():
                try:
                    if base_file is None:
                        quantizer = CALIBRATED if calibration else manifest.quantizer
                        add(encode(weights, manifest.format(tier), shape, quantizer, metrics))
                    else:
                        below = Base(read_extent_of(base_file, expert), manifest.format(str(base_tier(tier))))
                        version = encode_nested(weights, below, manifest.format(tier), shape, metrics)
                        add(version, base_file.checksums[expert])
                except FormatError as error:
                    where = f"expert {expert} of {manifest.layer_names[layer]} in {source.checkpoint.root}"
                    raise CheckpointError(f"{where}: {error}; leave out tier {tier}") from error
            progress(
                "experts", manifest.shape.index(ExpertKey(layer, expert)), manifest.shape.layers * manifest.experts
            )


def is_intact(manifest: Manifest, root: Path, layer: int, tier: str) -> bool:
    """Whether a layer's file is there and every extent matches its checksum."""
    try:
        return not damaged_extents(open_tier(root, manifest, layer, tier))
    except StoreError:
        return False


def describe_tier(manifest: Manifest, root: Path, tier: str) -> TierInfo:
    """Sizes and weight errors of a tier whose layer files are all there."""
    layout = VersionLayout.of(manifest.format(tier), manifest.shape.expert)
    errors = [e for layer in range(manifest.shape.layers) for e in open_tier(root, manifest, layer, tier).errors]
    return TierInfo(
        payload_bytes=layout.payload_bytes,
        extent_bytes=layout.extent_bytes,
        error_mean=sum(errors) / len(errors),
        error_max=max(errors),
    )


def _is_fitted(tier: str) -> bool:
    fmt = tier_format(tier)
    return fmt.quantized and not fmt.symmetric
