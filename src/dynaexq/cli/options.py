"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dynaexq.cli.configuration import ConfigOption
from dynaexq.cli.output import check_output
from dynaexq.core import OptionError
from dynaexq.formats import TIERS
from dynaexq.formats.base import DEFAULT_GROUP_SIZE, base_tier
from dynaexq.integrations.transformers.kept import KV_DTYPES
from dynaexq.launch import DEMO_EXPERT_MEMORY, EMBEDDED_MODEL
from dynaexq.launch_options import CACHED, DEFAULT_DENSE, PAIRED, LaunchOptions
from dynaexq.plan.sizes import parse_size
from dynaexq.policy.mixing import WAIT
from dynaexq.policy.regrouping import DEFAULT
from dynaexq.tuning import KNOBS, parse_tuning

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A checkpoint directory, a store made by `dynaexq prepare`, or a hub id.", show_default=False),
]
DemoOption = Annotated[bool, typer.Option("--demo", help="Use the embedded model, with 16 MiB for its experts.")]
ModeOption = Annotated[
    str,
    typer.Option(
        help="full: every expert at the highest tier; static: at --tier; uniform: at the best tier that fits; dynaexq: "
        "router traffic decides which experts get which tier; static-map: as --map says, for good; auto: what fits "
        "best; expertflow: some experts at --tier, the others read before they are needed, as far as that can be "
        "foreseen; lru, two-tier, lfu: when they are needed. To compare: blocking (dynaexq, "
        "waiting for each move), no-hysteresis (dynaexq, plain top-n)."
    ),
]
TierOption = Annotated[
    str | None,
    typer.Option(
        help=f"With --mode static, {', '.join(CACHED)}: {', '.join(name for name in TIERS if not base_tier(name))}.",
        show_default=False,
    ),
]
MemoryOption = Annotated[
    str | None,
    typer.Option(help="Hard limit on the whole process, such as 900M or 12G (imports included).", show_default=False),
]
ExpertMemoryOption = Annotated[
    str | None, typer.Option(help="Hard limit on the expert pool alone, such as 16M.", show_default=False)
]
HighOption = Annotated[str | None, typer.Option(help="The highest tier, of the hottest experts.", show_default=False)]
LowOption = Annotated[
    str | None,
    typer.Option(help="The lowest tier, of the coldest; with --mode expertflow, of misses.", show_default=False),
]
MapOption = Annotated[
    Path | None,
    typer.Option("--map", help="With --mode static-map: a profile made by `dynaexq calibrate`.", show_default=False),
]
StateOption = Annotated[
    Path | None,
    typer.Option(help="Keep hotness in this file: read at the start if it is there, then kept up.", show_default=False),
]
RankingOption = Annotated[
    Path | None,
    typer.Option(help="Start from a profile made by `dynaexq calibrate` (a --state wins).", show_default=False),
]
RecordMapOption = Annotated[
    Path | None,
    typer.Option(help="Write down the tier of every expert in every pass, to repeat the run.", show_default=False),
]
ReplayMapOption = Annotated[
    Path | None,
    typer.Option(help="Have experts at the tiers that --record-map wrote down, pass by pass.", show_default=False),
]
RecordOption = Annotated[
    Path | None,
    typer.Option(help="Write down what routers choose, for `dynaexq trace` and `simulate`.", show_default=False),
]
RecordHiddenOption = Annotated[
    bool,
    typer.Option("--record-hidden", help="Write down what routers are given too, to train predictors on: large files."),
]
TuneOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help=f"A knob of online precision, repeatable: {', '.join(KNOBS)}.", show_default=False
    ),
]
PredictorOption = Annotated[
    str | None,
    typer.Option(
        help="With --mode expertflow, what foresees routing: average, pregate, or a file of `dynaexq predictor train`. "
        "[default: the store's own, else pregate]",
        show_default=False,
    ),
]
MissPolicyOption = Annotated[
    str,
    typer.Option(
        help="With --mode expertflow, for experts that are not there when they are needed. wait: until they are read; "
        "low: run their versions at --low, also to be read; auto: wait for as many as --tune patience allows, the most "
        "important first. low and auto change what is computed."
    ),
]
GranularityOption = Annotated[
    str | None,
    typer.Option(
        help="Of sequences that share a cache of experts: batch (all take part in every step), sequence (those with "
        f"similar needs run for a while, then others) or token (chosen anew before each step). [default: {DEFAULT}]",
        show_default=False,
    ),
]
RouterTemperatureOption = Annotated[
    float,
    typer.Option(
        help="Divide what routers score by this: below 1, weights of chosen experts are further apart. Changes outputs."
    ),
]
DtypeOption = Annotated[str, typer.Option(help="Of dense weights and activations: float32 or bfloat16.")]
KernelOption = Annotated[str, typer.Option(help="Of the experts: native, or reference (exact and slow, in torch).")]
ActivationsOption = Annotated[
    str | None,
    typer.Option(
        help="With the native kernel: int8 (rounded by groups; 16 bits where weights have 8) or fp32. [default: int8]",
        show_default=False,
    ),
]
DenseOption = Annotated[
    str | None,
    typer.Option(
        help=f"Dense linear layers and embeddings: int4, int8, bf16, or full (torch's, in --dtype); all but "
        f"full need the native kernel. [default: {DEFAULT_DENSE}]",
        show_default=False,
    ),
]
TiersOption = Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(TIERS)}.")]
GroupSizeOption = Annotated[
    int | None,
    typer.Option(help=f"Inputs that share a scale: 32, 64 or 128. [default: {DEFAULT_GROUP_SIZE}]", show_default=False),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens of a sequence at most, prompt and answer. [default: the model's, up to 4096]",
        show_default=False,
    ),
]
KvDtypeOption = Annotated[
    str | None,
    typer.Option(
        help=f"Keys and values: {', '.join(KV_DTYPES)}. [default: as --dtype]",
        show_default=False,
    ),
]
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; - is stdout.", show_default=False),
]


def split_tiers(tiers: str) -> tuple[str, ...]:
    """The names in a list with commas; whoever uses them checks them."""
    return tuple(tier.strip() for tier in tiers.split(",") if tier.strip())


@dataclass(frozen=True)
class Request:
    """The model to open, and how to run it."""

    model: str
    options: LaunchOptions
    config: Path | None = None

    @property
    def files(self) -> tuple[Path | None, ...]:
        """Files that its options name, which nothing else may overwrite."""
        return self.config, *self.options.files


def read_request(
    model: ModelArgument = None,
    demo: DemoOption = False,
    mode: ModeOption = "auto",
    tier: TierOption = None,
    high: HighOption = None,
    low: LowOption = None,
    memory: MemoryOption = None,
    expert_memory: ExpertMemoryOption = None,
    map: MapOption = None,
    state: StateOption = None,
    ranking: RankingOption = None,
    record_map: RecordMapOption = None,
    replay_map: ReplayMapOption = None,
    record: RecordOption = None,
    record_hidden: RecordHiddenOption = False,
    tune: TuneOption = None,
    predictor: PredictorOption = None,
    granularity: GranularityOption = None,
    miss_policy: MissPolicyOption = WAIT,
    router_temperature: RouterTemperatureOption = 1.0,
    dtype: DtypeOption = "float32",
    kernel: KernelOption = "native",
    activations: ActivationsOption = None,
    dense: DenseOption = None,
    drive: str = "thread",
) -> Request:
    """The request that options amount to; `--demo` brings a default budget where a mode needs one.

    Raises:
        OptionError: unknown, conflicting or useless values.
    """
    options = LaunchOptions(
        mode=mode,
        tier=tier,
        memory=None if memory is None else parse_size(memory, "--memory"),
        expert_memory=None if expert_memory is None else parse_size(expert_memory, "--expert-memory"),
        dtype=dtype,
        kernel=kernel,
        activations=activations,
        dense=dense,
        high=high,
        low=low,
        profile=map,
        state=state,
        ranking=ranking,
        tune=parse_tuning(tune or []),
        drive=drive,
        record=record_map,
        replay=replay_map,
        trace=record,
        predictor=predictor,
        trace_hidden=record_hidden,
        granularity=granularity,
        miss_policy=miss_policy,
        router_temperature=router_temperature,
    )
    options.check()
    if state is not None:
        check_output("--state", state, map, ranking, record_map)
    if record_map is not None:
        check_output("--record-map", record_map, map, ranking, state)
    if record is not None:
        check_output("--record", record, map, ranking, state, record_map)
    name = pick_model(model, demo)
    if demo and mode in ("auto", "uniform", *PAIRED) and memory is None and expert_memory is None:
        options = replace(options, expert_memory=DEMO_EXPERT_MEMORY)
    return Request(name, options)


def takes_request(drive: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command all options of `read_request`, which it receives as its argument `request`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = dict(inspect.signature(read_request, eval_str=True).parameters)
        del shared["drive"]
        own = dict(inspect.signature(command, eval_str=True).parameters)
        del own["request"]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            config = values.pop("config")  # it has become the defaults of the others
            chosen = {name: values.pop(name) for name in shared}
            command(**values, request=replace(read_request(**chosen, drive=drive), config=config))

        config = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigOption)
        parameters = {"model": shared["model"], **own, **shared, "config": config}
        run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {name: each.annotation for name, each in parameters.items()}
        return run

    return decorate


def pick_model(model: str | None, demo: bool) -> str:
    """The model to open. Raises OptionError unless exactly one of MODEL and --demo is given."""
    if demo == (model is not None):
        raise OptionError("give either a MODEL or --demo" if demo else "give a MODEL, or --demo for the embedded one")
    return str(EMBEDDED_MODEL) if model is None else model
