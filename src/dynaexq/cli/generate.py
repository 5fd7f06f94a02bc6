"""`dynaexq generate`: a prompt answered within a memory limit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dynaexq.cli.options import JsonOption, KvDtypeOption, Request, takes_request
from dynaexq.cli.output import check_json_target, print_moves, progress_bar, reports_errors, stderr, write_json
from dynaexq.core import OptionError
from dynaexq.engine import Sampling
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.launch import EMBEDDED_MODEL, Launch, Opened
from dynaexq.llm import LLM, Answer
from dynaexq.plan.memory import format_bytes

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
        typer.Option(
            min=0,
            max=(1 << 63) - 1,
            help="Of the sampling; needs a temperature. Where experts move, answers can differ all the same.",
            show_default=False,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End the answer before this text; repeatable.", show_default=False)
    ] = None,
    kv_dtype: KvDtypeOption = None,
    json_target: JsonOption = None,
) -> None:
    """Answer a prompt, streaming, within a hard memory limit.

    The first use of a checkpoint prepares what the limit calls for into a cache (DYNAEXQ_CACHE) and keeps it.

    Examples:

      dynaexq generate --demo --prompt "copy: a b c"

      dynaexq generate ./Qwen3-30B-A3B --memory 12G --prompt "Why is the sky blue?"

      dynaexq generate ./store --mode static --tier int4 --prompt-file question.txt --json result.json
    """
    check_json_target(json_target, prompt_file, *request.files)
    useless = [name for name, given in (("--top-p", top_p != 1.0), ("--seed", seed is not None)) if given]
    if temperature == 0 and useless:
        raise OptionError(f"{' and '.join(useless)} would do nothing at temperature 0; give --temperature")
    if "" in (stop or ()):
        raise OptionError("--stop is given an empty text, which would stop nothing")
    model, options = request.model, request.options
    text = _read_prompt(prompt, prompt_file, model == str(EMBEDDED_MODEL))
    if not text.strip():
        raise OptionError("the prompt is empty")
    quiet_transformers()
    opened = Opened(model)
    encoder = PromptEncoder(opened.tokenizer)
    chat = not raw and encoder.has_template
    tokens = encoder.encode_chat([{"role": "user", "content": text}]) if chat else encoder.encode(text)
    room, most = len(tokens) + max_new_tokens, opened.skeleton.profile.max_context
    if room > most:
        raise OptionError(
            f"the prompt has {len(tokens)} tokens; with --max-new-tokens {max_new_tokens} that passes the model's "
            f"context of {most} tokens"
        )
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    quiet = json_target == "-"
    with progress_bar() as progress:
        llm = LLM(opened, options=options, slots=1, context=room, kv_dtype=kv_dtype, progress=progress)
    with llm:
        stream = llm.submit(tokens, max_new_tokens, stop or (), sampling)
        for piece in stream:
            if not quiet:
                _print_piece(piece)
    assert stream.answer is not None
    llm.launch.check_memory()
    if not quiet:
        _print_piece("\n")
    _print_summary(llm.launch, stream.answer)
    if json_target:
        write_json(json_target, {**_describe(stream.answer), **llm.launch.report()})


def _describe(answer: Answer) -> dict[str, Any]:
    finish = answer.finish
    return {
        "text": answer.text,
        "tokens": len(answer.tokens),
        "finish_reason": "stop" if answer.stopped is not None else finish.reason.value,
        "ttft_seconds": finish.ttft_seconds,
        "tokens_per_second": _decode_speed(answer),
        "prompt_tokens": finish.prompt_tokens,
    }


def _decode_speed(answer: Answer) -> float:
    """Tokens per second after the first; of an answer of one, that of the first."""
    finish = answer.finish
    first = finish.ttft_seconds or finish.seconds
    after = finish.seconds - first
    return (finish.generated_tokens - 1) / after if finish.generated_tokens > 1 else finish.generated_tokens / first


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


def _print_summary(launch: Launch, answer: Answer) -> None:
    report, plan, shape = launch.report(), launch.plan, launch.runtime.experts.shape
    stderr.print(
        f"{plan.mode}: {shape.layers} x {shape.experts} experts at {plan.tiers} "
        f"({report['bits_per_expert_weight']:.2f} bits/weight), {_kernel(report)}"
    )
    stderr.print(
        f"memory: experts {format_bytes(report['expert_bytes'])}, planned {format_bytes(report['device_bytes_peak'])} "
        f"of {format_bytes(report['budget_bytes'])}, process peak {format_bytes(report['rss_peak_bytes'])}"
    )
    stderr.print(
        f"speed: {len(answer.tokens)} tokens, first after {answer.finish.ttft_seconds or 0:.2f} s, then "
        f"{_decode_speed(answer):.1f} tokens/s; waited {report['waits']} times for weights"
    )
    if plan.high is not None:
        print_moves(report)
