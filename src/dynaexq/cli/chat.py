"""`dynaexq chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from dynaexq.cli.options import ContextOption, KvDtypeOption, Request, takes_request
from dynaexq.cli.output import progress_bar, reports_errors, stderr
from dynaexq.core import OptionError
from dynaexq.engine import RefusedError, Sampling
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import Opened
from dynaexq.llm import LLM

DEFAULT_TOP_P = 0.95
HELP = "/new starts over, /exit (or Ctrl-D) leaves; Ctrl-C stops an answer"


@reports_errors
@takes_request(drive="thread")
def chat(
    request: Request,
    system: Annotated[str | None, typer.Option(help="Instructions before the first turn.", show_default=False)] = None,
    context: ContextOption = None,
    kv_dtype: KvDtypeOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=10.0, help="0 is greedy.")] = 0.7,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Nucleus; needs a temperature. [default: 0.95]", show_default=False),
    ] = None,
) -> None:
    """Talk to a model. Each turn reuses what is computed of the conversation already.

    Examples:

      dynaexq chat --demo

      dynaexq chat ./store --memory 12G --system "Answer in one sentence."
    """
    if temperature == 0 and top_p is not None:
        raise OptionError("--top-p would do nothing at temperature 0; leave it out, or give a --temperature")
    quiet_transformers()
    opened = Opened(request.model)
    with progress_bar() as progress:
        llm = LLM(opened, slots=1, context=context, kv_dtype=kv_dtype, options=request.options, progress=progress)
    with llm:
        if not llm.encoder.has_template:
            raise OptionError("the model has no chat template; `dynaexq generate --raw` continues a text")
        stderr.print(HELP)
        sampling = Sampling(temperature=temperature, top_p=(top_p or DEFAULT_TOP_P) if temperature else 1.0)
        _talk(llm, [] if system is None else [{"role": "system", "content": system}], max_new_tokens, sampling)
    llm.launch.check_memory()


def _talk(llm: LLM, beginning: list[dict[str, Any]], most: int, sampling: Sampling) -> None:
    messages = list(beginning)
    while (line := _read_line()) is not None:
        if line == "/exit":
            return
        if line == "/new":
            messages = list(beginning)
            continue
        if line.startswith("/"):
            stderr.print(HELP)
            continue
        if not line:
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            text = _answer(llm, asked, most, sampling)
        except RefusedError as error:
            stderr.print(f"{error}; /new starts over")
            continue
        messages = [*asked, {"role": "assistant", "content": text}]


def _answer(llm: LLM, messages: list[dict[str, Any]], most: int, sampling: Sampling) -> str:
    prompt = llm.encoder.encode_chat(messages)
    stream = llm.submit(prompt, max(1, min(most, llm.engine.model.room - len(prompt))), (), sampling)
    shown = ""
    pieces = iter(stream)
    try:
        for piece in pieces:
            shown += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        print(" [stopped]", end="")
    print()
    if stream.answer is not None:
        finish = stream.answer.finish
        stderr.print(
            f"[dim]{finish.prompt_tokens} tokens before, {finish.reused_tokens} of them reused; "
            f"{finish.generated_tokens} after {finish.ttft_seconds or 0:.2f} s in {finish.seconds:.2f} s[/dim]"
        )
    return shown


def _read_line() -> str | None:
    """A line of the user's; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
