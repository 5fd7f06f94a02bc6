"""Stores of random weights, written in a stream: what a model's speed and memory can be measured with."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynaexq.core import ModelShape, StoreError
from dynaexq.formats import VersionLayout
from dynaexq.formats.base import with_bases
from dynaexq.formats.codec import Encoded
from dynaexq.store.dense import verify_dense, write_tensors
from dynaexq.store.files import file_checksum, lock_directory, replace_atomically, write_all
from dynaexq.store.layer_file import layer_path, write_layer
from dynaexq.store.manifest import Manifest
from dynaexq.store.noise import Bytes, RandomTensor, RandomVersions, open_stream
from dynaexq.store.reader import base_checksums, identity_of
from dynaexq.store.sources import Progress
from dynaexq.store.tier_writer import describe_tier, is_intact
from dynaexq.store.writer import PrepareOptions, check_target, remove_partial_files

QUANTIZER = "random"
RECIPE = 1
"""Of everything below and in noise.py and routing.py: a change of what is written for the same options raises it."""

DENSE_STREAM, EXPERT_STREAM = 0, 1


@dataclass(frozen=True)
class SyntheticModel:
    """What a store of random weights holds.

    `tensors` are the dense part, `files` the configuration and tokenizer, `depth` counts the model's layers, and
    `recipe` names everything else that decides the content, for the fingerprint.
    """

    name: str
    model_type: str
    layer_names: list[str]
    shape: ModelShape
    depth: int
    seed: int
    tensors: dict[str, RandomTensor]
    files: dict[str, bytes]
    recipe: dict[str, Any]

    @property
    def residual_scale(self) -> float:
        """Of matrices that write to the residual stream, which so stays of one size through all layers."""
        return float((2 * self.depth) ** -0.5)

    def fingerprint(self, group_size: int) -> str:
        """Identity of every byte that a store of this model can hold (32 hex digits)."""
        recipe = {**self.recipe, "version": RECIPE, "name": self.name, "seed": self.seed, "group_size": group_size}
        digest = hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=16)
        for name in sorted(self.files):
            if name != "config.json":  # follows from the recipe, but for what releases of Transformers add
                digest.update(name.encode() + self.files[name])
        return digest.hexdigest()


def write_synthetic(
    model: SyntheticModel, root: Path, options: PrepareOptions, progress: Progress
) -> tuple[Manifest, int]:
    """Create, resume or extend the store of `model` in `root`; one expert and a few MiB in memory at a time.

    What an earlier run finished is checked against its checksums and kept.

    Returns:
        The manifest, and how many bytes of weights were written: 0 where everything was there already.

    Raises:
        OptionError: unfit options, or `root` holds something else.
        StoreError: `root` is another store, the disk is too small, or cannot be written.
    """
    options.check(model.shape)
    tiers = with_bases(options.tiers)
    wanted = _manifest(model, options)
    manifest = check_target(root, wanted) or wanted
    _check_space(manifest, model, root, tiers)
    try:
        (root / "experts").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot create {root}: {error.strerror or error}") from error
    with lock_directory(root):
        manifest = check_target(root, wanted) or wanted
        remove_partial_files(root)
        if not manifest.files:
            manifest.save(root)
        manifest = manifest.model_copy(update={"files": _write_files(model.files, root)})
        manifest, dense = _write_dense(manifest, model, root, progress)
        manifest, experts = _write_tiers(manifest, model, root, tiers, progress)
        manifest.save(root)
    return manifest, dense + experts


def _manifest(model: SyntheticModel, options: PrepareOptions) -> Manifest:
    return Manifest(
        source=f"synthetic {model.name}",
        fingerprint=model.fingerprint(options.group_size),
        model_type=model.model_type,
        layer_names=model.layer_names,
        experts=model.shape.experts,
        hidden=model.shape.expert.hidden,
        intermediate=model.shape.expert.intermediate,
        group_size=options.group_size,
        quantizer=QUANTIZER,
    )


def _check_space(manifest: Manifest, model: SyntheticModel, root: Path, tiers: tuple[str, ...]) -> None:
    need = 0 if manifest.dense else sum(tensor.nbytes for tensor in model.tensors.values())
    for tier in tiers:
        extent_bytes = VersionLayout.of(manifest.format(tier), manifest.shape.expert).extent_bytes
        missing = sum(not layer_path(root, layer, tier).exists() for layer in range(manifest.shape.layers))
        need += missing * manifest.experts * extent_bytes
    place = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if need > free:
        raise StoreError(
            f"the disk of {root} has {free} bytes free, the store needs {need}; make space, choose fewer tiers, or "
            "fewer --layers"
        )


def _write_files(files: dict[str, bytes], root: Path) -> dict[str, int]:
    """Write side files that are not there as they should be; returns the checksums of all."""
    for name, text in files.items():
        path = root / name
        if not path.is_file() or path.read_bytes() != text:
            with replace_atomically(path) as descriptor:
                write_all(descriptor, text)
    return {name: file_checksum(root / name) for name in sorted(files)}


def _write_dense(manifest: Manifest, model: SyntheticModel, root: Path, progress: Progress) -> tuple[Manifest, int]:
    if manifest.dense:
        with contextlib.suppress(StoreError):
            verify_dense(root, manifest.dense)
            return manifest, 0
    total = sum(tensor.nbytes for tensor in model.tensors.values())
    advance = _counter("dense weights", total, progress)

    def draw(name: str) -> Iterator[Bytes]:
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        return model.tensors[name].chunks(open_stream(model.seed, DENSE_STREAM, key))

    dense = write_tensors(model.tensors, draw, root, advance)
    manifest = manifest.model_copy(update={"dense": dense})
    manifest.save(root)
    return manifest, dense.nbytes


def _write_tiers(
    manifest: Manifest, model: SyntheticModel, root: Path, tiers: tuple[str, ...], progress: Progress
) -> tuple[Manifest, int]:
    advance = _counter("experts", len(tiers) * manifest.shape.layers * manifest.experts, progress)
    written = 0
    for tier in tiers:
        for layer in range(manifest.shape.layers):
            if is_intact(manifest, root, layer, tier):
                advance(manifest.experts)
            else:
                written += _write_layer(manifest, model, root, layer, tier, advance)
        manifest = manifest.model_copy(update={"tiers": {**manifest.tiers, tier: describe_tier(manifest, root, tier)}})
    return manifest, written


def _write_layer(
    manifest: Manifest, model: SyntheticModel, root: Path, layer: int, tier: str, advance: Callable[[int], None]
) -> int:
    fmt, shape = manifest.format(tier), manifest.shape.expert
    extent_bytes = VersionLayout.of(fmt, shape).extent_bytes
    stream = open_stream(model.seed, EXPERT_STREAM, layer, fmt.bits + 256 * fmt.base_bits + 65536 * fmt.down_bits)
    versions = RandomVersions(fmt, shape, model.residual_scale, stream)
    path = layer_path(root, layer, tier)
    with write_layer(path, identity_of(manifest, layer, tier), manifest.experts, extent_bytes) as add:
        bases: Sequence[int | None] = base_checksums(manifest, root, layer, tier) or [None] * manifest.experts
        for base in bases:
            add(Encoded(torch.from_numpy(versions.draw()), 0.0), base)
            advance(1)
    return manifest.experts * extent_bytes


def _counter(what: str, total: int, progress: Progress) -> Callable[[int], None]:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(what, done, total)

    return advance
