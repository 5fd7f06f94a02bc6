"""The tiers of a store: every expert read once a layer and encoded into all tiers that miss it.

Of a calibrated store, what every version loses in outputs is measured on the way, on the bytes that are written; what
calibration says of experts as such stands in the manifest before the first tier.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from dynaexq.core import CheckpointError, ExpertKey, FormatError, StoreError
from dynaexq.formats import VersionLayout, decode, encode, tier_format
from dynaexq.formats.base import base_tier
from dynaexq.formats.codec import Base, encode_nested
from dynaexq.formats.quantizers import CALIBRATED
from dynaexq.store.layer_file import damaged_extents, layer_path, read_extent_of, write_layer
from dynaexq.store.manifest import CalibrationInfo, Manifest, TierInfo
from dynaexq.store.reader import identity_of, open_tier
from dynaexq.store.sources import Calibration, ExpertSource, Progress


def prepare_tiers(
    manifest: Manifest,
    source: ExpertSource,
    root: Path,
    tiers: tuple[str, ...],
    progress: Progress,
    calibration: Calibration | None,
) -> Manifest:
    """Write what is missing or damaged of `tiers`, each nested one after its base; returns the manifest with them.

    Raises:
        StoreError: a file cannot be written.
        CheckpointError: a tensor is unreadable, or too large for a tier.
    """
    total = manifest.shape.layers * manifest.experts
    if calibration and manifest.calibration is None:
        manifest = manifest.model_copy(update={"calibration": _describe_experts(source, calibration, progress)})
        manifest.save(root)
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
            add = stack.enter_context(
                write_layer(path, identity, manifest.experts, extent_bytes, calibration is not None)
            )
            base = base_tier(tier)
            writers[tier] = add, open_tier(root, manifest, layer, base) if base else None
        for expert in range(manifest.experts):
            key = ExpertKey(layer, expert)
            weights = source.read(key)
            metrics = calibration.metrics(key, weights) if calibration and fitted else None
            for tier, (add, base_file) in writers.items():
                fmt, below = manifest.format(tier), None
                try:
                    if base_file is None:
                        quantizer = CALIBRATED if calibration else manifest.quantizer
                        version = encode(weights, fmt, shape, quantizer, metrics)
                    else:
                        below = Base(read_extent_of(base_file, expert), manifest.format(str(base_tier(tier))))
                        version = encode_nested(weights, below, fmt, shape, metrics)
                except FormatError as error:
                    where = f"expert {expert} of {manifest.layer_names[layer]} in {source.checkpoint.root}"
                    raise CheckpointError(f"{where}: {error}; leave out tier {tier}") from error
                lost = None
                if calibration:
                    lost = calibration.output_error(key, weights, decode(version.block, fmt, shape, below))
                add(version, base_file.checksums[expert] if base_file else None, lost)
            progress(
                "experts", manifest.shape.index(ExpertKey(layer, expert)), manifest.shape.layers * manifest.experts
            )


def _describe_experts(source: ExpertSource, calibration: Calibration, progress: Progress) -> CalibrationInfo:
    """What calibration says of experts, whatever their versions."""
    selections: list[list[float]] = [[] for _ in range(source.shape.layers)]
    peaks: list[list[float]] = [[] for _ in range(source.shape.layers)]
    keys = source.shape.expert_keys()
    for done, key in enumerate(keys, 1):
        selections[key.layer].append(_rounded(calibration.selections(key)))
        peaks[key.layer].append(_rounded(calibration.peak(key, source.read(key))))
        progress("what experts put out", done, len(keys))
    sensitivity = [_rounded(each) for each in calibration.sensitivity]
    return CalibrationInfo(sensitivity=sensitivity, selections=selections, peaks=peaks)


def _rounded(value: float) -> float:
    """As many digits as mean anything: the manifest stays small."""
    return float(f"{value:.6g}")


def is_intact(manifest: Manifest, root: Path, layer: int, tier: str) -> bool:
    """Whether a layer's file is there, every extent matches its checksum, and errors in outputs are with them if the
    store is calibrated."""
    try:
        file = open_tier(root, manifest, layer, tier)
        return bool(file.output_errors) == (manifest.calibration is not None) and not damaged_extents(file)
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
