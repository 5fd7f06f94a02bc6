"""`dynaexq plan`: whether and how a model fits, before anything is loaded or downloaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from dynaexq.cli.options import ContextOption, JsonOption, KvDtypeOption, Request, takes_request
from dynaexq.cli.output import check_outputs, reports_errors, write_json
from dynaexq.cli.plan_view import describe_outlook, print_outlook
from dynaexq.core import MemoryLimitError, OptionError
from dynaexq.engine import EngineOptions
from dynaexq.integrations.hub import is_hub_id
from dynaexq.integrations.transformers.families import top_k_of
from dynaexq.integrations.transformers.geometries import GEOMETRIES
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import Opened
from dynaexq.llm import size_workload
from dynaexq.plan.picture import plot_parts
from dynaexq.plan.speed import expect_speed, read_probe
from dynaexq.planning import Geometry, Remote, active_experts, look_ahead, zipf_traffic
from dynaexq.policy.hotness import Scores
from dynaexq.traffic.profile import TrafficProfile
from dynaexq.traffic.trace import TraceReader
from dynaexq.traffic.trace_statistics import measure_trace


@reports_errors
@takes_request(drive="thread")
def plan(
    request: Request,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Sequences that run at a time.")] = 4,
    context: ContextOption = None,
    kv_dtype: KvDtypeOption = None,
    trace: Annotated[
        Path | None, typer.Option(help="A trace of the workload: which experts it makes hot.", show_default=False)
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="The same from a profile of `dynaexq calibrate`.", show_default=False)
    ] = None,
    zipf: Annotated[
        float | None,
        typer.Option(min=0.0, max=10.0, help="Or an assumed skew: traffic falls as 1/rank^ZIPF.", show_default=False),
    ] = None,
    probe: Annotated[
        Path | None, typer.Option(help="A result of `dynaexq probe --json`, for speed.", show_default=False)
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="A picture of all parts, .png or .svg.", show_default=False)
    ] = None,
    json_target: JsonOption = None,
) -> None:
    """Say what every part of a model takes, which mode and tiers a memory limit affords, and what to change if none.

    MODEL may also be the name of a public geometry, such as qwen3-30b-a3b: then no file is needed at all. Of a
    checkpoint, here or on the hub, headers and configuration are read, and no weights. The plan is the one that
    `generate` and `serve` make at their start. Exit code 6: it does not fit.

    Examples:

      dynaexq plan qwen3-30b-a3b --memory 16G

      dynaexq plan ./Qwen3-30B-A3B --memory 12G --slots 8 --context 16384 --zipf 1

      dynaexq plan ./store --memory 12G --trace run.parquet --probe probe.json --json plan.json
    """
    inputs = (trace, profile, probe, *request.files)
    check_outputs({"--json": json_target, "--plot": picture}, inputs)
    if sum(each is not None for each in (trace, profile, zipf)) > 1:
        raise OptionError("--trace, --profile and --zipf each say what traffic is like; give one")
    machine = read_probe(probe) if probe else None
    quiet_transformers()
    opened = _open(request.model)
    options, shape = request.options, opened.skeleton.profile.shape
    most = opened.skeleton.profile.max_context
    work = size_workload(most, slots, context, kv_dtype, EngineOptions(), options.dtype)
    traffic, source = _read_traffic(opened, trace, profile, zipf)
    outlook = look_ahead(opened, options, work, traffic)
    speed = None
    if machine and outlook.plan and not outlook.plan.cached:
        top_k = top_k_of(opened.skeleton.model.config)
        active = active_experts(outlook.plan, shape.layers * top_k, outlook.by_tier)
        sizes = {tier: nbytes // (shape.layers * shape.experts) for tier, nbytes in outlook.tiers.items()}
        speed = expect_speed(opened.skeleton.profile, replace(work, dense=options.dense_form), active, sizes, machine)
    if picture is not None:
        plot_parts(outlook.name, outlook.bars, outlook.limit, picture)
    if json_target != "-":
        print_outlook(outlook, shape, source, speed)
    if json_target:
        write_json(json_target, describe_outlook(outlook, shape, source, speed))
    if outlook.plan is None:
        raise MemoryLimitError(outlook.reason or "it does not fit")


def _open(model: str) -> Opened:
    if model in GEOMETRIES and not Path(model).exists():
        return Geometry(model)
    return Remote(model) if is_hub_id(model) else Opened(model)


def _read_traffic(
    opened: Opened, trace: Path | None, profile: Path | None, zipf: float | None
) -> tuple[Scores | None, str | None]:
    """Selections by expert, and where they are from."""
    shape = opened.skeleton.profile.shape
    if trace is not None:
        reader = TraceReader.open(trace)
        anonymous = isinstance(opened, Geometry | Remote)
        reader.check_model(reader.head.fingerprint if anonymous else opened.fingerprint, shape)
        found = measure_trace(reader.head, reader.batches(), reader.tokens).traffic
        reader.close()
        return found, f"the trace {trace}"
    if profile is not None:
        sums = TrafficProfile.read(profile).sums
        if sums.shape != (shape.layers, shape.experts):
            layers, experts = sums.shape
            raise OptionError(f"--profile {profile} is of another model: {layers} layers of {experts} experts")
        return np.asarray(sums), f"the profile {profile}"
    if zipf is not None:
        return zipf_traffic(shape, zipf), f"an assumed skew of {zipf:g}"
    if opened.known:
        return opened.known.traffic, "the calibration of the store"
    return None, None
