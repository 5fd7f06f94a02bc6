"""Options that several commands share."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from dynaexq.core import OptionError
from dynaexq.launch import ADAPTIVE, DEMO_EXPERT_MEMORY, EMBEDDED_MODEL, LaunchOptions
from dynaexq.plan.sizes import parse_size

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="A checkpoint directory, a store made by `dynaexq prepare`, or a hub id.", show_default=False),
]
DemoOption = Annotated[bool, typer.Option("--demo", help="Use the embedded model, with 16 MiB for its experts.")]
ModeOption = Annotated[
    str,
    typer.Option(
        help="full: every expert at the highest tier; static: at --tier; dynaexq: router traffic decides which experts "
        "get the higher of two tiers; blocking: the same, waiting for each move, to compare; auto: what fits best."
    ),
]
TierOption = Annotated[
    str | None, typer.Option(help="With --mode static: bf16, int8, int4, int2 or int1.", show_default=False)
]
MemoryOption = Annotated[
    str | None,
    typer.Option(help="Hard limit on the whole process, such as 900M or 12G (imports included).", show_default=False),
]
ExpertMemoryOption = Annotated[
    str | None, typer.Option(help="Hard limit on the expert pool alone, such as 16M.", show_default=False)
]
HighOption = Annotated[
    str | None, typer.Option(help="With --mode dynaexq: the tier of the hottest experts.", show_default=False)
]
LowOption = Annotated[str | None, typer.Option(help="With --mode dynaexq: the tier of all others.", show_default=False)]
DtypeOption = Annotated[str, typer.Option(help="Of dense weights and activations: float32 or bfloat16.")]
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as JSON; - is stdout.", show_default=False),
]


def pick_model(model: str | None, demo: bool) -> str:
    """The model to open. Raises OptionError unless exactly one of MODEL and --demo is given."""
    if demo == (model is not None):
        raise OptionError("give either a MODEL or --demo" if demo else "give a MODEL, or --demo for the embedded one")
    return str(EMBEDDED_MODEL) if model is None else model


def launch_options(
    mode: str,
    tier: str | None,
    memory: str | None,
    expert_memory: str | None,
    dtype: str,
    demo: bool,
    high: str | None,
    low: str | None,
) -> LaunchOptions:
    """Checked launch options; `--demo` brings a default budget where a mode needs one."""
    parsed = LaunchOptions(
        mode=mode,
        tier=tier,
        memory=None if memory is None else parse_size(memory, "--memory"),
        expert_memory=None if expert_memory is None else parse_size(expert_memory, "--expert-memory"),
        dtype=dtype,
        high=high,
        low=low,
    )
    parsed.check()
    if demo and mode in ("auto", *ADAPTIVE) and memory is None and expert_memory is None:
        return replace(parsed, expert_memory=DEMO_EXPERT_MEMORY)
    return parsed
