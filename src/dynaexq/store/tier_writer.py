"""The tiers of a store: every expert read once a layer and encoded into all tiers that miss it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dynaexq.core import CheckpointError, ExpertKey, FormatError, StoreError
from dynaexq.formats import VersionLayout, encode, tier_format
from dynaexq.formats.base import base_tier
from dynaexq.formats.codec import Base, encode_nested
from dynaexq.formats.quantizers import CALIBRATED
from dynaexq.store.layer_file import damaged_extents, layer_path, read_extent_of, write_layer
from dynaexq.store.manifest import Manifest, TierInfo
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
