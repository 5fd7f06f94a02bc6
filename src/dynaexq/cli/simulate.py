"""`dynaexq simulate`: how a recorded workload would run with other bytes, tiers and knobs, in virtual time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from dynaexq.cli.options import ExpertMemoryOption, HighOption, JsonOption, LowOption, MapOption, TuneOption
from dynaexq.cli.output import check_outputs, progress_bar, reports_errors, write_json
from dynaexq.cli.simulate_predictor import read_needed_routers
from dynaexq.cli.simulate_sweep import SweepOutput, check_configurations, sweep_and_report
from dynaexq.cli.simulate_view import print_costs, print_report
from dynaexq.core import OptionError
from dynaexq.plan.sizes import parse_size
from dynaexq.plan.speed import read_probe
from dynaexq.predictor.choice import NAMES
from dynaexq.simulate.conditions import fit_to_traces, parse_costs
from dynaexq.simulate.options import DRIVES, MODES, SimulationOptions
from dynaexq.simulate.report import simulate as simulate_run
from dynaexq.simulate.sweep import Settings, SweepJob, apply_settings, combine, parse_gigabytes, parse_grid
from dynaexq.simulate.trace_source import open_source
from dynaexq.traffic.trace import TraceReader
from dynaexq.tuning import GIGABYTE, parse_tuning


@reports_errors
def simulate(
    trace: Annotated[Path, typer.Argument(help="A trace, as --record and `dynaexq trace` make them.")],
    mode: Annotated[str, typer.Option(help=f"One of {', '.join(MODES)}.")] = "dynaexq",
    tier: Annotated[str | None, typer.Option(help="With --mode static and caches.", show_default=False)] = None,
    high: HighOption = None,
    low: LowOption = None,
    expert_memory: ExpertMemoryOption = None,
    map: MapOption = None,
    predictor: Annotated[
        str | None,
        typer.Option(
            help="With --mode expertflow: average, pregate (a trace of --record-hidden, and --store), or a file of "
            "`dynaexq predictor train`. [default: average]",
            show_default=False,
        ),
    ] = None,
    accuracy: Annotated[
        float | None,
        typer.Option(help="Instead, a predictor that knows the trace, with this recall and precision, above 0 to 1."),
    ] = None,
    tune: TuneOption = None,
    store: Annotated[
        Path | None,
        typer.Option(help="The store of the model: what its versions lose, and their sizes.", show_default=False),
    ] = None,
    expert: Annotated[
        str | None, typer.Option(help="HIDDENxINTERMEDIATE, where the trace does not say.", show_default=False)
    ] = None,
    link: Annotated[
        str | None, typer.Option(help="GB/s of copies from the store. [default: --probe's]", show_default=False)
    ] = None,
    latency: Annotated[float, typer.Option(min=0.0, help="Milliseconds that every copy takes beside.")] = 0.0,
    drag: Annotated[
        float,
        typer.Option(help="Seconds by which a second of copies makes a pass longer: 1/threads where they take a core."),
    ] = 0.0,
    compute: Annotated[
        str | None,
        typer.Option(
            help="What passes take: start=MS,token=MS,read=GB/s, or the --json of an earlier simulation. [default: "
            "fitted to the trace]",
            show_default=False,
        ),
    ] = None,
    fit: Annotated[
        list[Path] | None,
        typer.Option(help="Another trace of the same machine to fit that to; repeatable.", show_default=False),
    ] = None,
    probe: Annotated[Path | None, typer.Option(help="A result of `dynaexq probe --json`.", show_default=False)] = None,
    drive: Annotated[str, typer.Option(help="thread: versions move beside passes; replay: between them.")] = "thread",
    gaps: Annotated[bool, typer.Option("--gaps", help="Start no pass before it started when recorded.")] = False,
    record_map: Annotated[
        Path | None, typer.Option(help="Write down the tier of every expert in every pass.", show_default=False)
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=V1,V2", help="Try every combination of these values; repeatable.", show_default=False
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes of a sweep. [default: all cores]")] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Keep the runs of a sweep in this file, and go on where it ends.", show_default=False),
    ] = None,
    configs: Annotated[
        Path | None,
        typer.Option(help="Directory for the best settings, as files for --config.", show_default=False),
    ] = None,
    best: Annotated[int | None, typer.Option(min=1, help="How many of them. [default: 3]")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of a sweep, .png or .svg.", show_default=False)] = None,
    json_target: JsonOption = None,
) -> None:
    """Run recorded router traffic through the engine's own policy and transitions, without a model.

    Modes lru, two-tier and lfu are caches of experts at --tier, read on need; belady is the best that any such cache
    could do; expertflow also reads ahead, by a predictor, or by the trace itself (--accuracy).
    Says what share of the traffic would run at which tier, how long passes and waits would be, and what would be moved.
    Names for --sweep: mode, tier, high, low, expert-memory, link (GB/s), predictor, accuracy, and the knobs of --tune.

    Examples:

      dynaexq generate --demo --prompt "..." --record run.parquet

      dynaexq simulate run.parquet --high int8 --low int2 --expert-memory 12M --link 2

      dynaexq simulate run.parquet --store ./store --expert-memory 12M --probe probe.json --gaps --json -

      dynaexq simulate run.parquet --mode expertflow --tier int4 --expert-memory 4M --link 1 --sweep lookahead=0,1,2,4,8

      dynaexq simulate run.parquet --store ./store --probe p.json --sweep expert-memory=8M,12M --sweep alpha=0.8,0.9 \\
        --results runs.jsonl --plot front.svg --configs ./best
    """
    if drive not in DRIVES:
        raise OptionError(f"unknown drive '{drive}'; known are {', '.join(DRIVES)}")
    _check_sweep(sweep, jobs, results, configs, plot, record_map)
    outputs = {"--json": json_target, "--plot": plot, "--results": results, "--record-map": record_map}
    typed = None if compute is None or "=" in compute else Path(compute)
    trained = None if predictor in (None, *NAMES) else Path(predictor)
    check_outputs(outputs, (trace, map, probe, typed, trained, *(fit or [])))
    if configs is not None:
        check_configurations(configs)
        if drive == "replay":
            raise OptionError("--configs goes with --drive thread, which is how `generate` and `serve` move versions")
    if best is not None and configs is None:
        raise OptionError("--best goes with --configs")
    if probe is not None and compute is not None and (link is not None or drive == "replay"):
        raise OptionError("--probe does nothing beside --link and --compute, which say all that it could; leave it out")
    probed = read_probe(probe) if probe else None
    grid = parse_grid(sweep or [])
    speed = parse_gigabytes(link, "--link") if link else probed.link if probed else None
    still = drive == "replay" or {mode, *grid.get("mode", [])} <= {"static", "static-map"}
    if still and (link is not None or "link" in grid):
        raise OptionError("--link does nothing where versions stay or move between passes; leave it out")
    if speed is None and "link" not in grid and not still:
        raise OptionError("how fast copies are is not known: say --link GB/s, or --probe FILE")
    options = SimulationOptions(
        mode=mode,
        tier=tier,
        high=high,
        low=low,
        expert_memory=None if expert_memory is None else parse_size(expert_memory, "--expert-memory"),
        tune=parse_tuning(tune or []),
        drive=drive,
        link=speed or GIGABYTE,
        latency=latency / 1000,
        drag=drag,
        gaps=gaps,
        profile=map,
        record=record_map,
        predictor=predictor,
        accuracy=accuracy,
    )
    runs = combine(grid)
    given: dict[str, object] = {"tier": tier, "high": high, "low": low, "expert-memory": expert_memory, "link": link}
    given |= {"predictor": predictor, "accuracy": accuracy}
    if configs is not None and (accuracy is not None or "accuracy" in grid):
        raise OptionError("--configs writes what can be run, and no predictor is known to have an --accuracy")
    checked = _check_runs(options, grid, runs, given)
    reader = TraceReader.open(trace)
    open_source(reader.head, store, expert).close()
    routers = read_needed_routers(checked, reader, store)
    if compute is not None and fit:
        raise OptionError("--fit does nothing beside --compute, which says what passes take; leave one out")
    read = probed.read if probed else None
    costs = parse_costs(compute) if compute is not None else fit_to_traces([trace, *(fit or [])], read)
    job = SweepJob(trace, store, expert, costs, options, routers)
    if sweep:
        sweep_and_report(
            job, runs, jobs or os.cpu_count() or 1, SweepOutput(results, configs, best or 3, plot, json_target)
        )
        return
    print_costs(costs)
    with progress_bar() as progress:
        report = simulate_run(
            open_source(reader.head, store, expert),
            options,
            costs,
            reader,
            _counter(progress, reader.tokens),
            routers,
        )
    reader.close()
    if json_target != "-":
        print_report(report)
    if json_target:
        write_json(json_target, {**report.as_json(), "costs": costs.model_dump()})


def _check_sweep(sweep: list[str] | None, *others: object) -> None:
    names = ("--jobs", "--results", "--configs", "--plot")
    if not sweep:
        for name, value in zip(names, others, strict=False):
            if value is not None:
                raise OptionError(f"{name} goes with --sweep")
    elif others[-1] is not None:
        raise OptionError("--record-map goes with a single run, not with --sweep")


def _check_runs(
    options: SimulationOptions, grid: dict[str, list[str]], runs: list[Settings], given: Mapping[str, object]
) -> list[SimulationOptions]:
    """What runs are. Raises OptionError for a setting that is given twice, or a run that cannot be."""
    for name in grid:
        if given.get(name) is not None or name in options.tune:
            option = f"--tune {name}" if name in options.tune else f"--{name}"
            raise OptionError(f"{option} does nothing beside --sweep {name}; leave one out")
    found = []
    for settings in runs:
        try:
            found.append(apply_settings(options, settings))
            found[-1].check()
        except OptionError as error:
            shown = " ".join(f"--sweep {name}={value}" for name, value in settings.items())
            raise OptionError(f"{shown}: {error}" if shown else str(error)) from None
    return found


def _counter(progress: Callable[[str, int, int], None], total: int) -> Callable[[int], None]:
    done = 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress("simulating", done, total)

    return count
