"""`dynaexq prepare`: a checkpoint becomes a store."""

from __future__ import annotations

import contextlib
import time
import warnings
from pathlib import Path
from typing import Annotated

import typer

from dynaexq.cli.options import GroupSizeOption, JsonOption, split_tiers
from dynaexq.cli.output import check_json_target, progress_bar, reports_errors, stderr, write_json
from dynaexq.core import OptionError, StoreError
from dynaexq.formats import DEFAULT_QUANTIZER, QUANTIZERS, TIERS, tier_format
from dynaexq.formats.base import DEFAULT_GROUP_SIZE, with_bases
from dynaexq.integrations.hub import resolve_model
from dynaexq.integrations.transformers.calibration import InputCalibration
from dynaexq.integrations.transformers.loading import open_experts, quiet_transformers
from dynaexq.plan.memory import format_bytes
from dynaexq.plan.process import peak_resident_bytes
from dynaexq.store import MANIFEST_NAME, ExpertStore, PrepareOptions, prepare_store
from dynaexq.traffic.inputs import ExpertInputs

PLAIN_TIERS = "int2,int4,int8,bf16"
FITTED_TIERS = "int2,int2d3,int2d4,int3d4,int4d8,int8"
"""Those between which bytes are allocated best (benchmarks/budgets.py)."""


@reports_errors
def prepare(
    model: Annotated[str, typer.Argument(help="A checkpoint directory or a hub id.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory of the store: new, empty, or to go on with.")
    ],
    tiers: Annotated[
        str | None,
        typer.Option(
            help=f"Comma-separated: {', '.join(TIERS)}. [default: {PLAIN_TIERS}; with --calibration {FITTED_TIERS}]",
            show_default=False,
        ),
    ] = None,
    group_size: GroupSizeOption = None,
    quantizer: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(QUANTIZERS)}. [default: {DEFAULT_QUANTIZER}]", show_default=False),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Inputs of experts, by `calibrate --inputs`: fit versions to them.", show_default=False),
    ] = None,
    json_target: JsonOption = None,
) -> None:
    """Make a store of expert versions from a checkpoint, or go on with an unfinished one.

    Streams one expert at a time; whatever ends it early, the same command resumes. Tiers can be added later. int4+4 and
    int2+2 refine int4 and int2 and bring them along.

    Examples:

      dynaexq prepare ./Qwen3-30B-A3B -o ./store --tiers int2,int4

      dynaexq prepare org/name -o ./store --tiers int4,bf16 --group-size 128

      dynaexq prepare ./Qwen3-30B-A3B -o ./store --calibration ./inputs
    """
    check_json_target(json_target)
    quiet_transformers()
    names = split_tiers(tiers or (FITTED_TIERS if calibration else PLAIN_TIERS))
    if names == ("bf16",) and (group_size is not None or quantizer is not None):
        raise OptionError("--group-size and --quantizer do nothing for bf16 alone; leave them out")
    if calibration is not None and quantizer is not None:
        raise OptionError("--calibration decides how versions are quantised; leave out --quantizer")
    if calibration is not None and all(tier_format(name).symmetric for name in names):
        raise OptionError(f"--calibration does nothing for {', '.join(names)}: tiers below int8 are fitted")
    options = PrepareOptions(names, group_size or DEFAULT_GROUP_SIZE, quantizer or DEFAULT_QUANTIZER)
    root = resolve_model(model)
    if (root / MANIFEST_NAME).exists():
        raise OptionError(f"{root} is a store already; give the checkpoint it was made from")
    if not any((root / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        warnings.warn(f"{root} has no tokenizer, so the store will have none: it cannot generate text", stacklevel=1)
    start = time.perf_counter()
    _, source = open_experts(root)
    with progress_bar() as progress:
        fitted = None
        if calibration is not None:
            inputs = ExpertInputs.open(calibration, source.checkpoint.fingerprint(), source.shape)
            inputs.verify(lambda done, total: progress("reading the calibration", done, total))
            fitted = InputCalibration(inputs, source)
        manifest = prepare_store(source, output, options, progress, calibration=fitted)
    predicted: dict[str, float] = {}
    with contextlib.suppress(StoreError):  # tiers that were not asked for may be damaged
        sensitivity = ExpertStore.open(output).sensitivity
        predicted = sensitivity.predict() if sensitivity else {}
    for name in with_bases(options.tiers):
        info = manifest.tiers[name]
        loss = f", predicted KL {predicted[name]:.2g} nats per token" if predicted else ""
        stderr.print(
            f"{name}: {format_bytes(info.extent_bytes * manifest.shape.layers * manifest.experts)}, "
            f"weight error mean {info.error_mean:.4f}, worst expert {info.error_max:.4f}{loss}"
        )
    stderr.print(f"store ready in {output} ({time.perf_counter() - start:.1f} s)")
    if json_target:
        result = {
            "output": str(output),
            "seconds": time.perf_counter() - start,
            "rss_peak_bytes": peak_resident_bytes(),
        }
        write_json(json_target, {**result, "manifest": manifest.model_dump()})
