"""`dynaexq evaluate`: perplexity of a text within a memory limit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from dynaexq.cli.options import JsonOption, Request, takes_request
from dynaexq.cli.output import check_json_target, print_moves, progress_bar, reports_errors, stderr, write_json
from dynaexq.core import OptionError
from dynaexq.engine import EngineOptions
from dynaexq.evaluate import Windows, cut_windows, measure_perplexity, read_documents
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import Opened
from dynaexq.llm import LLM
from dynaexq.plan.memory import format_bytes


@reports_errors
@takes_request(drive="replay")
def evaluate(
    request: Request,
    text: Annotated[
        Path | None,
        typer.Option(
            help="A text file, or .jsonl with text, question+answer or prompt+canonical_solution.", show_default=False
        ),
    ] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per forward pass.")] = 512,
    stride: Annotated[int, typer.Option(min=1, help="Tokens scored per window; smaller gives more context.")] = 256,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Score this many tokens.", show_default=False)] = None,
    json_target: JsonOption = None,
) -> None:
    """Measure perplexity per token of a text, by a sliding window, within a hard memory limit.

    Examples:

      dynaexq evaluate --demo --text data/english_heldout.txt

      dynaexq evaluate ./store --mode static --tier int2 --text notes.txt --max-tokens 20000 --json -
    """
    check_json_target(json_target, text, *request.files)
    if "prefill_weight" in request.options.tune:
        raise OptionError("prefill_weight does nothing in `evaluate`, where every pass is a prefill; leave it out")
    model, options = request.model, request.options
    if text is None:
        raise OptionError("give a --text")
    document = "\n\n".join(read_documents(text))
    quiet_transformers()
    opened = Opened(model)
    if window > opened.skeleton.profile.max_context:
        raise OptionError(f"--window {window} is above the model's context of {opened.skeleton.profile.max_context}")
    ids = torch.tensor(opened.tokenizer(document)["input_ids"], dtype=torch.long)
    windows = cut_windows(ids, window, stride, max_tokens)
    whole = EngineOptions(step_tokens=window, chunk=window, score_tokens=window, reuse=False)  # one pass a window
    with progress_bar() as progress:
        llm = LLM(opened, slots=1, context=window, engine=whole, options=options, progress=progress)

        def score(each: Windows) -> list[float]:
            tokens = tuple(each.ids[0].tolist())
            return [float(event.logprob or 0) for event in llm.score(tokens, len(tokens) - each.scored)]

        with llm:
            start = time.perf_counter()
            result = measure_perplexity(
                score, windows, lambda done, total, value: progress(f"perplexity: {value:.3f}", done, total)
            )
            seconds = time.perf_counter() - start
    llm.launch.check_memory()
    plan, report = llm.launch.plan, llm.launch.report()
    speed = result.tokens / seconds
    stderr.print(
        f"{plan.mode}, experts at {plan.tiers}: {format_bytes(report['expert_bytes'])}, "
        f"process peak {format_bytes(report['rss_peak_bytes'])}, {speed:.0f} tokens/s"
    )
    if plan.high is not None:
        print_moves(report)
    if json_target:
        numbers = {"perplexity": result.perplexity, "tokens": result.tokens, "text_file": str(text)}
        write_json(json_target, {**numbers, "tokens_per_second": speed, "seconds": seconds, **report})
    if json_target != "-":
        print(f"perplexity {result.perplexity:.4f} over {result.tokens} tokens of {text}")
