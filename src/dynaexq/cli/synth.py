"""`dynaexq synth`: a store of a public geometry with random weights, to measure speed and memory with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from dynaexq.cli.options import GroupSizeOption, JsonOption, TiersOption, split_tiers
from dynaexq.cli.output import check_json_target, progress_bar, reports_errors, stderr, write_json
from dynaexq.core import OptionError, StoreError
from dynaexq.formats.base import DEFAULT_GROUP_SIZE
from dynaexq.integrations.transformers.geometries import GEOMETRIES
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.integrations.transformers.random_model import ROUTINGS, describe_random_model
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.plan.memory import format_bytes
from dynaexq.plan.process import peak_resident_bytes
from dynaexq.store import PrepareOptions
from dynaexq.store.synthetic import write_synthetic
from dynaexq.traffic import TrafficProfile


@reports_errors
def synth(
    geometry: Annotated[str, typer.Argument(help=f"One of {', '.join(GEOMETRIES)}.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory of the store: new, empty, or to go on with.")
    ],
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the model, in place of the geometry's.", show_default=False)
    ] = None,
    vocab: Annotated[
        int | None, typer.Option(min=1, help="Size of the vocabulary, likewise; 4096 or more.", show_default=False)
    ] = None,
    tiers: TiersOption = "int4,int2",
    group_size: GroupSizeOption = None,
    routing: Annotated[
        str,
        typer.Option(
            metavar="uniform|zipf|FILE",
            help="How routers spread traffic: evenly; by 1/rank; or as in a profile made by `dynaexq calibrate` with a "
            "model of as many experts.",
        ),
    ] = "uniform",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    json_target: JsonOption = None,
) -> None:
    """Make a store of a public geometry with random weights: for speed and memory, without a download.

    It runs like any other store, with the embedded model's tokenizer; what it says is noise. Every tier is random by
    itself, so qualities cannot be compared.

    Examples:

      dynaexq synth qwen3-30b-a3b -o ./store

      dynaexq synth gpt-oss-20b -o ./store --layers 4 --vocab 4096 --tiers bf16,int4 --routing zipf
    """
    check_json_target(json_target)
    names = split_tiers(tiers)
    if names == ("bf16",) and group_size is not None:
        raise OptionError("--group-size does nothing for bf16 alone; leave it out")
    options = PrepareOptions(names, group_size or DEFAULT_GROUP_SIZE)
    overrides = {"num_hidden_layers": layers, "vocab_size": vocab}
    chosen = {name: value for name, value in overrides.items() if value is not None}
    quiet_transformers()
    start = time.perf_counter()
    wanted = routing if routing in ROUTINGS else read_hotness(Path(routing))
    model = describe_random_model(geometry, EMBEDDED_MODEL, wanted, seed, **chosen)
    with progress_bar() as progress:
        _, written = write_synthetic(model, output, options, progress)
    seconds = time.perf_counter() - start
    shape = model.shape
    what = f"{geometry}, {shape.layers} MoE layers of {shape.experts} experts at {', '.join(names)}"
    if written:
        stderr.print(f"{what}: {format_bytes(written)} written ({seconds:.1f} s); store ready in {output}")
    else:
        stderr.print(f"{what}: already there in {output}, every byte as written ({seconds:.1f} s)")
    if json_target:
        result = {
            "geometry": geometry,
            "output": str(output),
            "layers": shape.layers,
            "experts": shape.experts,
            "tiers": list(names),
            "routing": routing,
            "seed": seed,
            "bytes_written": written,
            "seconds": seconds,
            "rss_peak_bytes": peak_resident_bytes(),
        }
        write_json(json_target, result)


def read_hotness(path: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Hotness [layers, experts] of a traffic profile, whichever model it is of.

    Raises:
        OptionError: there is no such file.
        StoreError: it is no whole profile.
    """
    try:
        there = path.is_file()
    except OSError as error:  # names too long
        raise StoreError(f"cannot read the traffic profile {path}: {error.strerror or error}") from error
    if not there:
        raise OptionError(f"unknown routing '{path}'; give {' or '.join(ROUTINGS)}, or a profile's file")
    return TrafficProfile.read(path).sums
