"""`dynaexq trace`: look at router traces, cut and join them, and get them from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dynaexq.cli.options import JsonOption
from dynaexq.cli.output import (
    check_json_target,
    check_output,
    check_picture,
    progress_bar,
    reports_errors,
    stderr,
    write_json,
)
from dynaexq.cli.serve import ADMIN_KEY_VARIABLE
from dynaexq.cli.top_client import StateClient
from dynaexq.cli.trace_view import describe_trace, print_overlaps, print_trace
from dynaexq.core import OptionError, StoreError
from dynaexq.integrations.transformers.families import top_k_of
from dynaexq.integrations.transformers.geometries import GEOMETRIES, geometry_options, make_config
from dynaexq.integrations.transformers.loading import build_skeleton, quiet_transformers
from dynaexq.simulate.trace_source import parse_expert
from dynaexq.store.files import replace_atomically, write_all
from dynaexq.traffic.trace import TraceHead, TraceReader
from dynaexq.traffic.trace_edit import Part, merge_traces, parse_span, slice_trace, write_trace
from dynaexq.traffic.trace_import import FORMATS, make_head, make_rows, read_foreign
from dynaexq.traffic.trace_plot import plot_traces
from dynaexq.traffic.trace_statistics import HOT_SHARES, TraceStatistics, measure_trace, overlap
from dynaexq.traffic.trace_synthetic import SyntheticTraffic, draw_trace
from dynaexq.traffic.trace_writer import check_trace_target

PHASES = {"prefill": True, "decode": False}

trace = typer.Typer(name="trace", help="Router traces: what --record wrote down.", no_args_is_help=True)

FilesArgument = Annotated[list[Path], typer.Argument(help="Traces.")]
FileArgument = Annotated[Path, typer.Argument(help="A trace.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="The trace to write, .parquet.")]


@trace.command()
@reports_errors
def info(files: FilesArgument, json_target: JsonOption = None) -> None:
    """Say what traces hold: skew, entropy, repetition, what a pass activates, and how much hot sets have in common.

    Examples:

      dynaexq trace info run.parquet

      dynaexq trace info text.parquet math.parquet code.parquet --json -
    """
    check_json_target(json_target, *files)
    measured = _measure(files)
    overlaps = {
        share: [
            (first, second, overlap(measured[first][1].traffic, measured[second][1].traffic, share))
            for place, first in enumerate(measured)
            for second in list(measured)[place + 1 :]
        ]
        for share in HOT_SHARES
    }
    if json_target != "-":
        for name, (head, found) in measured.items():
            print_trace(name, head, found)
        print_overlaps(overlaps)
    if json_target:
        named: list[dict[str, Any]] = [
            {"hot_share": share, "files": [first, second], "overlap": value}
            for share, pairs in overlaps.items()
            for first, second, value in pairs
        ]
        traces = {name: describe_trace(head, found) for name, (head, found) in measured.items()}
        write_json(json_target, {"traces": traces, "overlaps": named})


@trace.command("slice")
@reports_errors
def cut(
    file: FileArgument,
    output: OutputOption,
    windows: Annotated[str | None, typer.Option(help="Passes FROM:BEFORE.", show_default=False)] = None,
    requests: Annotated[str | None, typer.Option(help="Requests FROM:BEFORE.", show_default=False)] = None,
    phase: Annotated[str | None, typer.Option(help="prefill or decode.", show_default=False)] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="At most so many.", show_default=False)] = None,
) -> None:
    """Write a part of a trace.

    Examples:

      dynaexq trace slice run.parquet -o answers.parquet --phase decode --tokens 10000
    """
    if phase is not None and phase not in PHASES:
        raise OptionError(f"--phase {phase}: say prefill or decode")
    part = Part(
        parse_span(windows, "--windows"),
        parse_span(requests, "--requests"),
        None if phase is None else PHASES[phase],
        tokens,
    )
    if part == Part():
        raise OptionError("say which part: --windows, --requests, --phase or --tokens")
    _check_target(output, file)
    print(f"{slice_trace(file, part, output)} tokens in {output}")


@trace.command()
@reports_errors
def merge(files: FilesArgument, output: OutputOption) -> None:
    """Write traces one after the other: a workload that shifts.

    Examples:

      dynaexq trace merge text.parquet math.parquet code.parquet -o shifting.parquet
    """
    if len(files) < 2:
        raise OptionError("give at least two traces")
    _check_target(output, *files)
    print(f"{merge_traces(files, output)} tokens in {output}")


@trace.command()
@reports_errors
def plot(
    files: FilesArgument, output: Annotated[Path, typer.Option("--output", "-o", help="A picture, .png or .svg.")]
) -> None:
    """Draw traces: heavy tails, hot sets in common, what a pass activates, and heat maps.

    Examples:

      dynaexq trace plot text.parquet math.parquet code.parquet -o workloads.png
    """
    check_picture("--output", output)
    check_output("--output", output, *files)
    if output.suffix not in (".png", ".svg"):
        raise OptionError(f"--output {output}: name a file that ends in .png or .svg")
    plot_traces({name: found for name, (_, found) in _measure(files).items()}, output)
    stderr.print(f"wrote {output}")


@trace.command()
@reports_errors
def fetch(
    url: Annotated[str, typer.Argument(help="A server's address, as `dynaexq serve` printed it.")],
    output: OutputOption,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long to record.")] = 30.0,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar=ADMIN_KEY_VARIABLE, help="The server's admin key.", show_default=False, show_envvar=True),
    ] = None,
) -> None:
    """Have a running server record what its routers choose from now on, and get the trace.

    Examples:

      dynaexq trace fetch http://127.0.0.1:8000 -o now.parquet --seconds 60
    """
    _check_target(output)
    if admin_key is None:
        raise OptionError(f"give --admin-key or set {ADMIN_KEY_VARIABLE}")
    data = StateClient(url, admin_key).fetch_trace(seconds)
    try:
        with replace_atomically(output) as descriptor:
            write_all(descriptor, data)
    except StoreError as error:
        raise OptionError(str(error)) from error
    reader = TraceReader.open(output)
    print(f"{reader.tokens} tokens in {output}")


@trace.command("import")
@reports_errors
def import_trace(
    file: Annotated[Path, typer.Argument(help="Expert ids of every token, as JSON, JSON lines, CSV or NPZ.")],
    output: OutputOption,
    experts: Annotated[
        int | None, typer.Option(min=1, help="Of a layer. [default: as many as are named]", show_default=False)
    ] = None,
    expert: Annotated[
        str | None, typer.Option(help="Size of one, HIDDENxINTERMEDIATE, such as 2048x768.", show_default=False)
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", help=f"{', '.join(FORMATS)}. [default: by the file's name]", show_default=False),
    ] = None,
    prompt: Annotated[int, typer.Option(min=0, help="So many tokens at the beginning are a prompt.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Tokens of each pass after that.")] = 1,
) -> None:
    """Make a trace of what another program wrote down.

    JSON: a list of tokens, each a list over layers of lists of ids; or such a token a line; or {"experts": such a
    token}. CSV: token,layer,expert0,... with a row for each token and layer. NPZ: integers `ids` [tokens, layers,
    top_k], and `weights` if there are.

    Examples:

      dynaexq trace import routing.jsonl -o routing.parquet --experts 128 --expert 2048x768
    """
    _check_target(output, file)
    size = parse_expert(expert) if expert else None
    found = read_foreign(file, form)
    head = make_head(found, experts, (size.hidden, size.intermediate) if size else (0, 0), file.name)
    if prompt > len(found.ids):
        raise OptionError(f"--prompt {prompt}: the file has {len(found.ids)} tokens")
    print(f"{write_trace(output, head, make_rows(found, batch, prompt), found.weights is not None)} tokens in {output}")


@trace.command()
@reports_errors
def synth(
    output: OutputOption,
    geometry: Annotated[str | None, typer.Option(help=f"One of {', '.join(GEOMETRIES)}.", show_default=False)] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="MoE layers.", show_default=False)] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Of a layer.", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Experts of a token.", show_default=False)] = None,
    tokens: Annotated[int, typer.Option(min=1, help="In all.")] = 10_000,
    zipf: Annotated[float, typer.Option(help="Skew of popularity; 0 is even.")] = 1.0,
    shift_every: Annotated[
        int | None, typer.Option(min=1, help="Tokens after which the workload shifts.", show_default=False)
    ] = None,
    burst: Annotated[float, typer.Option(help="How likely a decoded token belongs to a burst of other experts.")] = 0.0,
    repeat: Annotated[float, typer.Option(help="How likely a token has the experts of the one before.")] = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 1,
    prompt: Annotated[int, typer.Option(min=0, help="Tokens of each request's prompt.")] = 0,
    answer: Annotated[int, typer.Option(min=1, help="Tokens that each request decodes.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Of all draws.")] = 0,
) -> None:
    """Make up a trace: Zipf popularity, shifts, bursts and repetition. The same seed gives the same trace.

    Examples:

      dynaexq trace synth -o zipf.parquet --geometry qwen3-30b-a3b --tokens 20000 --batch 8 --shift-every 5000

      dynaexq trace synth -o even.parquet --layers 24 --experts 64 --top-k 6 --zipf 0 --prompt 512
    """
    head = _synthetic_head(geometry, layers, experts, top_k)
    traffic = SyntheticTraffic(tokens, zipf, shift_every, burst, repeat, batch, prompt, answer, seed)
    traffic.check()
    _check_target(output)
    note = ", ".join(f"{name} {value}" for name, value in vars(traffic).items())
    rows = draw_trace(head.model_copy(update={"note": note}), traffic)
    with progress_bar() as progress:

        def counted() -> Any:
            done = 0
            for each in rows:
                done += len(each.window)
                progress("drawing", done, tokens)
                yield each

        written = write_trace(output, head.model_copy(update={"note": note}), counted(), weights=False)
    print(f"{written} tokens in {output}")


def _synthetic_head(geometry: str | None, layers: int | None, experts: int | None, top_k: int | None) -> TraceHead:
    numbers = (layers, experts, top_k)
    if geometry is not None:
        if any(number is not None for number in numbers):
            raise OptionError("--geometry says layers, experts and top-k; leave the others out")
        quiet_transformers()
        config = make_config(geometry_options(geometry))
        shape = build_skeleton(config).profile.shape
        return TraceHead(
            source="synthetic",
            model=geometry,
            layers=shape.layers,
            experts=shape.experts,
            top_k=top_k_of(config),
            hidden=shape.expert.hidden,
            intermediate=shape.expert.intermediate,
        )
    if layers is None or experts is None or top_k is None:
        raise OptionError("give --geometry, or --layers, --experts and --top-k")
    try:
        return TraceHead(source="synthetic", model="synthetic", layers=layers, experts=experts, top_k=top_k)
    except ValueError as error:
        raise OptionError(f"{layers} layers of {experts} experts, {top_k} a token: too many") from error


def _check_target(output: Path, *others: Path) -> None:
    check_output("--output", output, *others)
    check_trace_target(output, "--output")


def _measure(files: list[Path]) -> dict[str, tuple[TraceHead, TraceStatistics]]:
    """Heads and statistics by file name."""
    if len({str(path) for path in files}) != len(files):
        raise OptionError("the same trace is given twice")
    measured = {}
    with progress_bar() as progress:
        for done, path in enumerate(files):
            progress("reading", done, len(files))
            reader = TraceReader.open(path)
            if not reader.tokens:
                raise OptionError(f"{path} holds no tokens")
            found = measure_trace(reader.head, reader.batches(), reader.tokens)
            measured[str(path)] = (reader.head, found)
            reader.close()
    shapes = {head.shape for head, _ in measured.values()}
    if len(shapes) > 1:
        raise OptionError(f"the traces are of models of different shapes: {', '.join(map(str, sorted(shapes)))}")
    return measured
