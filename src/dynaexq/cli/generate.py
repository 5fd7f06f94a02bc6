"""`dynaexq generate`: a prompt answered within a memory limit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dynaexq.cli.options import JsonOption, Request, takes_request
from dynaexq.cli.output import check_json_target, print_moves, progress_bar, reports_errors, stderr, write_json
from dynaexq.core import OptionError
from dynaexq.integrations.transformers.generation import Generation, Sampling, encode_prompt, generate_text
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import EMBEDDED_MODEL, Launch, Opened
from dynaexq.launch_options import DTYPES
from dynaexq.plan.memory import Workload, format_bytes

DEMO_PROMPT = "There are 7 boxes with 4 coins in each box. How many coins are there in total?"
MAX_PROMPT_BYTES = 16 << 20


@reports_errors
@takes_request(drive="thread")
def generate(
    request: Request,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; - reads stdin.", show_default=False)
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.", show_default=False)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: continue the prompt as it is.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=10.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1.0, help="Nucleus; needs a temperature.")] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=(1 << 63) - 1, help="Of the sampling; needs a temperature.", show_default=False),
    ] = None,
    json_target: JsonOption = None,
) -> None:
    """Answer a prompt, streaming, within a hard memory limit.

    The first use of a checkpoint prepares what the limit calls for into a cache (DYNAEXQ_CACHE) and keeps it.

    Examples:

      dynaexq generate --demo --prompt "copy: a b c"

      dynaexq generate ./Qwen3-30B-A3B --memory 12G --prompt "Why is the sky blue?"

      dynaexq generate ./store --mode static --tier int4 --prompt-file question.txt --json result.json
    """
    check_json_target(json_target, prompt_file, *request.options.files)
    if temperature == 0 and (top_p != 1.0 or seed is not None):
        raise OptionError("--top-p and --seed do nothing at temperature 0; give --temperature")
    model, options = request.model, request.options
    text = _read_prompt(prompt, prompt_file, model == str(EMBEDDED_MODEL))
    if not text.strip():
        raise OptionError("the prompt is empty")
    quiet_transformers()
    opened = Opened(model)
    chat = not raw and bool(getattr(opened.tokenizer, "chat_template", None))
    ids = encode_prompt(opened.tokenizer, text, chat, opened.skeleton.profile.max_context, max_new_tokens)
    tokens = ids.shape[1]
    work = Workload(tokens, tokens + max_new_tokens, 1, 1, DTYPES[options.dtype].itemsize, kv_cache=True)
    plan = opened.plan(options, work)
    with progress_bar() as progress:
        launch = opened.launch(options, plan, progress)
    quiet = json_target == "-"
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    emit = (lambda piece: None) if quiet else _print_piece
    result = generate_text(launch.model, opened.tokenizer, ids, sampling, emit)
    launch.runtime.close()
    launch.check_memory()
    if not quiet:
        _print_piece("\n")
    _print_summary(launch, result)
    if json_target:
        numbers = {key: value for key, value in vars(result).items() if key != "text"}
        write_json(json_target, {"text": result.text, **numbers, "prompt_tokens": tokens, **launch.report()})


def _read_prompt(prompt: str | None, prompt_file: Path | None, demo: bool) -> str:
    if prompt is not None and prompt_file is not None:
        raise OptionError("give --prompt or --prompt-file, not both")
    if prompt_file is not None:
        try:
            if prompt_file.stat().st_size > MAX_PROMPT_BYTES:
                raise OptionError(f"{prompt_file} is larger than {MAX_PROMPT_BYTES >> 20} MiB")
            return prompt_file.read_text(encoding="utf-8")
        except OSError as error:
            raise OptionError(f"cannot read {prompt_file}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise OptionError(f"{prompt_file} is not UTF-8 text (byte {error.start})") from error
    if prompt == "-":
        return sys.stdin.read(MAX_PROMPT_BYTES)
    if prompt is None:
        if not demo:
            raise OptionError("give a --prompt")
        return DEMO_PROMPT
    return prompt


def _print_piece(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _kernel(report: dict[str, Any]) -> str:
    how = f"{report['activations']} activations, {report['instructions']}"
    dense = "" if report["dense"] == "full" else f", dense layers {report['dense']}"
    return f"kernel {report['kernel']} ({how}){dense}"


def _print_summary(launch: Launch, result: Generation) -> None:
    report, plan, shape = launch.report(), launch.plan, launch.runtime.experts.shape
    at = plan.tier if plan.high is None else f"{plan.tier}, {report['experts_high']} of them at {plan.high}"
    stderr.print(
        f"{plan.mode}: {shape.layers} x {shape.experts} experts at {at} "
        f"({report['bits_per_expert_weight']:.2f} bits/weight), {_kernel(report)}"
    )
    stderr.print(
        f"memory: experts {format_bytes(report['expert_bytes'])}, planned {format_bytes(report['device_bytes_peak'])} "
        f"of {format_bytes(report['budget_bytes'])}, process peak {format_bytes(report['rss_peak_bytes'])}"
    )
    stderr.print(
        f"speed: {result.tokens} tokens, first after {result.ttft_seconds:.2f} s, then {result.tokens_per_second:.1f} "
        f"tokens/s; waited {report['waits']} times for weights"
    )
    if plan.high is not None:
        print_moves(report)
