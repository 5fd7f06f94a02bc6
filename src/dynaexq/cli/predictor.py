"""`dynaexq predictor`: how well routing can be foreseen, and predictors that learn it from traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from dynaexq.cli.options import DemoOption, JsonOption, ModelArgument, pick_model
from dynaexq.cli.output import check_json_target, check_output, progress_bar, reports_errors, stderr, write_json
from dynaexq.cli.predictor_view import print_judgement, print_predictability
from dynaexq.core import OptionError, SideFileError
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import Opened
from dynaexq.policy.prediction import Routers
from dynaexq.predictor.examples import Examples, gather_examples
from dynaexq.predictor.files import PREDICTOR_NAME, load_predictor
from dynaexq.predictor.judging import Judgement, judge_predictor
from dynaexq.predictor.training import TrainingOptions, train_predictor
from dynaexq.predictor.yardsticks import MAX_REACH, Recall, judge, measure_recall
from dynaexq.traffic.trace import TraceReader
from dynaexq.traffic.trace_statistics import TraceStatistics, measure_trace

predictor = typer.Typer(
    name="predictor", help="What --mode expertflow foresees routing by: how well, and training.", no_args_is_help=True
)

TracesOption = Annotated[
    list[Path] | None,
    typer.Option("--traces", help="A trace that --record wrote, repeatable.", show_default=False),
]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Of all traces together, at most.")]
ReachOption = Annotated[int, typer.Option(min=1, max=MAX_REACH, help="Layers to look ahead.")]

DEFAULTS = TrainingOptions()


class Ground(NamedTuple):
    """What predictors are judged on: a model, its routers, and tokens of traces."""

    opened: Opened
    routers: Routers | None
    statistics: TraceStatistics
    examples: Examples


@predictor.command()
@reports_errors
def report(
    model: ModelArgument = None,
    demo: DemoOption = False,
    traces: TracesOption = None,
    file: Annotated[
        Path | None, typer.Option("--predictor", help="Judge this trained predictor too.", show_default=False)
    ] = None,
    reach: ReachOption = DEFAULTS.reach,
    max_tokens: MaxTokensOption = 20_000,
    json_target: JsonOption = None,
) -> None:
    """Say how well the routing of traces can be foreseen, and whether that helps.

    Predictors that look at hidden states need traces of --record-hidden. Every fifth request is held out: everything
    is judged by those, also a trained predictor, which did not learn from them if it was trained on the same traces.

    Examples:

      dynaexq generate ./store --prompt "..." --record run.parquet --record-hidden

      dynaexq predictor report ./store --traces run.parquet

      dynaexq predictor report ./store --traces other.parquet --predictor ./store/predictor.safetensors --json -
    """
    paths = traces or []
    check_json_target(json_target, *paths)
    ground = _prepare(pick_model(model, demo), paths, reach, max_tokens)
    opened, examples = ground.opened, ground.examples
    trained = None
    if file is not None:
        trained = load_predictor(file, opened.fingerprint, opened.skeleton.profile.shape)
        if examples.hidden is None:
            raise OptionError("--predictor looks at hidden states; give traces that --record-hidden wrote")
        if trained.head.routers and ground.routers is None:
            raise SideFileError(f"{file} corrects what the model's routers say, and they are of an unknown form")
    found = _measure(ground, reach)
    judgement = judge_predictor(trained, examples, ground.routers) if trained else None
    verdict, helps = judge(found)
    if json_target != "-":
        print_predictability(ground.statistics, examples, found, verdict)
        if judgement:
            print_judgement(judgement, str(file))
    if json_target:
        write_json(json_target, _describe(ground, found, helps, judgement))


@predictor.command()
@reports_errors
def train(
    model: ModelArgument = None,
    demo: DemoOption = False,
    traces: TracesOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help=f"The predictor. [default: {PREDICTOR_NAME} in the store, for its use]"),
    ] = None,
    earlier: Annotated[
        Path | None, typer.Option("--from", help="Go on from this predictor (fine-tuning).", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier predictor.")] = False,
    width: Annotated[int, typer.Option(help="Numbers inside the corrector of a layer.")] = DEFAULTS.width,
    reach: ReachOption = DEFAULTS.reach,
    window: Annotated[int, typer.Option(help="Tokens that the network looks back on.")] = DEFAULTS.window,
    ahead: Annotated[int, typer.Option(help="Passes that its chances are for.")] = DEFAULTS.ahead,
    epochs: Annotated[int, typer.Option(help="Times that all tokens are gone over.")] = DEFAULTS.epochs,
    seed: Annotated[int, typer.Option(min=0, help="Of first weights and order.")] = DEFAULTS.seed,
    max_tokens: MaxTokensOption = 20_000,
    json_target: JsonOption = None,
) -> None:
    """Train a predictor on traces that --record-hidden wrote: some ten thousand tokens of what you do, in CPU minutes.

    It corrects what the routers of later layers say of this layer's hidden states, and looks at the last tokens for
    what comes after. How well routing can be foreseen without it is said first. It is saved beside the store, where
    --mode expertflow finds it.

    Examples:

      dynaexq predictor train ./store --traces mail.parquet --traces code.parquet

      dynaexq predictor train ./store --traces today.parquet --from ./store/predictor.safetensors -o tuned.safetensors
    """
    paths = traces or []
    check_json_target(json_target, output, *paths)
    options = TrainingOptions(width, reach, window, ahead, epochs, seed)
    opened = Opened(pick_model(model, demo))
    target = _pick_target(opened, output, force, paths)
    options.check(opened.skeleton.profile.shape.layers)
    first = load_predictor(earlier, opened.fingerprint, opened.skeleton.profile.shape) if earlier else None
    ground = _prepare(opened, paths, reach, max_tokens)
    if ground.examples.hidden is None:
        raise OptionError("there is nothing to learn from without hidden states; record with --record-hidden")
    found = _measure(ground, reach)
    verdict, helps = judge(found)
    if json_target != "-":
        print_predictability(ground.statistics, ground.examples, found, verdict)
    with progress_bar() as progress:
        trained = train_predictor(ground.examples, ground.routers, options, first, progress)
    judgement = judge_predictor(trained, ground.examples, ground.routers)
    figures = {f"recall_{distance}": value for distance, value in enumerate(judgement.recall, 1)}
    head = trained.head.model_copy(
        update={
            "looks_back": judgement.looks_back,
            "traces": [path.name for path in paths],
            "report": {**figures, "calibration": judgement.calibration},
        }
    )
    trained._replace(head=head).save(target)
    if json_target != "-":
        print_judgement(judgement, str(target))
    if json_target:
        write_json(json_target, {"output": str(target), **_describe(ground, found, helps, judgement)})


def _prepare(model: str | Opened, paths: list[Path], reach: int, max_tokens: int) -> Ground:
    if not paths:
        raise OptionError("give at least one --traces FILE, written with --record FILE --record-hidden")
    quiet_transformers()
    opened = model if isinstance(model, Opened) else Opened(model)
    shape = opened.skeleton.profile.shape
    if reach > shape.layers:
        raise OptionError(f"--reach {reach} is more than a whole pass: the model has {shape.layers} MoE layers")
    readers = [TraceReader.open(path) for path in paths]
    for reader in readers:
        reader.check_model(opened.fingerprint, shape)
    examples = gather_examples(readers, max_tokens)
    if examples.hidden is None:
        plain = next(reader.path for reader in readers if not reader.has_hidden)
        stderr.print(f"{plain} has no hidden states (--record-hidden): only what needs none can be judged")
    tokens = sum(reader.tokens for reader in readers)
    statistics = measure_trace(readers[0].head, (rows for reader in readers for rows in reader.batches()), tokens)
    return Ground(opened, opened.routers(), statistics, examples)


def _measure(ground: Ground, reach: int) -> Recall:
    layers = ground.examples.head.layers
    done = 0
    with progress_bar() as progress:

        def step() -> None:
            nonlocal done
            done += 1
            progress("judging", done, layers)

        return measure_recall(ground.examples, ground.routers, reach, step)


def _pick_target(opened: Opened, output: Path | None, force: bool, inputs: list[Path]) -> Path:
    """Where the predictor goes. Raises OptionError where it cannot, or would replace another one."""
    assert opened.home is not None
    own = opened.home / PREDICTOR_NAME
    target = own if output is None or output.resolve() == own.resolve() else output
    if target is own:
        if not opened.home.is_dir():
            raise OptionError("the model was not prepared yet, so there is no store to save into; give an --output")
    else:
        check_output("--output", target, *inputs)
    if target.exists() and not force:
        raise OptionError(f"{target} exists; --force replaces it, --output FILE writes another")
    return target


def _describe(ground: Ground, found: Recall, helps: bool, judgement: Judgement | None) -> dict[str, Any]:
    statistics = ground.statistics
    return {
        "tokens": len(ground.examples.ids),
        "held_out": int(ground.examples.held.sum()),
        "entropy": statistics.entropy,
        "repeats": statistics.repeats,
        "chance": statistics.chance,
        "recall": found,
        "helps": helps,
        "trained": None if judgement is None else judgement._asdict(),
    }
