"""`dynaexq calibrate`: which experts a text makes hot, saved as a traffic profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from dynaexq.cli.options import (
    DemoOption,
    DtypeOption,
    ExpertMemoryOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    read_request,
)
from dynaexq.cli.output import check_json_target, check_output, progress_bar, reports_errors, stderr, write_json
from dynaexq.core import OptionError
from dynaexq.evaluate import read_documents
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.integrations.transformers.sensitivity import POSITIONS, measure_sensitivity
from dynaexq.launch import Launch, Opened
from dynaexq.launch_options import DTYPES
from dynaexq.plan.memory import Workload
from dynaexq.traffic import TrafficMeter, TrafficProfile, check_signal
from dynaexq.traffic.inputs import InputsWriter, check_inputs_target

ENOUGH_TOKENS = 10_000
"""For versions that are fitted to what experts are given."""

SENSITIVITY_TOKENS, SENSITIVITY_WINDOW = 2048, 256
"""Of all texts together, about, and of a forward pass: what layers' sensitivity is measured on. Each token goes through
the model once for every layer."""


@reports_errors
def calibrate(
    model: ModelArgument = None,
    demo: DemoOption = False,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A text file, or .jsonl as for `evaluate`; repeatable.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The profile, a JSON file.", show_default=False)
    ] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="Directory for what experts are given, for `prepare --calibration`.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier profile or calibration.")] = False,
    window: Annotated[int, typer.Option(min=1, help="Tokens per forward pass.")] = 512,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of each text, at most.", show_default=False)] = None,
    signal: Annotated[str, typer.Option(help="count: router selections; mass: routed probability.")] = "count",
    memory: MemoryOption = None,
    expert_memory: ExpertMemoryOption = None,
    dtype: DtypeOption = "float32",
    json_target: JsonOption = None,
) -> None:
    """Find out which experts texts are routed to and what they are given, every expert at the best tier that fits.

    The profile serves --mode static-map (--map) and the start of --mode dynaexq (--ranking), at any tiers. Experts'
    inputs (--inputs) let `prepare --calibration` fit versions to them, which takes a third to a half off what low tiers
    lose; some ten thousand tokens of the kinds of text you use are enough. How much errors in each layer matter is
    measured along with them, on a part of the texts.

    Examples:

      dynaexq calibrate --demo --text data/gsm8k_test.jsonl -o math.json

      dynaexq calibrate ./store --text mail.txt --text code.txt --max-tokens 50000 -o ours.json

      dynaexq calibrate ./Qwen3-30B-A3B --text mail.txt --text code.txt --max-tokens 8192 --inputs ./inputs
    """
    check_json_target(json_target, output, *(text or []))
    check_signal(signal)
    request = read_request(model, demo, mode="uniform", memory=memory, expert_memory=expert_memory, dtype=dtype)
    if not text:
        raise OptionError("give at least one --text")
    if output is None and inputs is None:
        raise OptionError("give an --output, --inputs or both")
    if output is not None:
        check_output("--output", output, *text)
        if output.exists() and not force:
            raise OptionError(f"{output} exists; --force replaces it")
    if inputs is not None:
        if output is not None and (output == inputs or inputs in output.parents):
            raise OptionError(f"--output {output} is, or is in, the directory of --inputs; give another name")
        check_inputs_target(inputs, force)
    documents = ["\n\n".join(read_documents(path)) for path in text]
    quiet_transformers()
    opened = Opened(request.model)
    if window > opened.skeleton.profile.max_context:
        raise OptionError(f"--window {window} is above the model's context of {opened.skeleton.profile.max_context}")
    logits = POSITIONS if inputs else 1
    work = Workload(window, window, 1, logits, DTYPES[dtype].itemsize, kv_cache=False)
    plan = opened.plan(request.options, work)
    with progress_bar() as progress:
        launch = opened.launch(request.options, plan, progress)
        streams = [opened.tokenizer(each, verbose=False)["input_ids"][:max_tokens] for each in documents]
        names = [path.name for path in text]
        writer = _tap_inputs(launch, opened.fingerprint, sum(map(len, streams)), inputs) if inputs else None
        meter, tokens = _measure(launch, streams, window, signal, lambda done, total: progress("routing", done, total))
        if writer is not None:
            windows = _sensitivity_windows(streams, window)
            found = measure_sensitivity(launch.model, windows, lambda done, total: progress("sensitivity", done, total))
            writer.finish(plan.tier, names, found)
    launch.check_memory()
    if writer is not None:
        few = f"; more are better: some {ENOUGH_TOKENS}" if tokens < ENOUGH_TOKENS // 5 else ""
        stderr.print(f"{inputs}: what experts were given by {tokens} tokens, running at {plan.tier}{few}")
    if output is not None:
        routed = int(meter.sums.sum())
        TrafficProfile.of(opened.fingerprint, signal, meter.sums, routed, names).save(output)
    shares = [_share(meter, share) for share in (0.1, 0.25, 0.5)]
    stderr.print(
        f"{output or 'routing'}: {tokens} tokens; the hottest 10, 25, 50 % of each layer's experts take "
        f"{', '.join(f'{100 * share:.0f}' for share in shares)} % of its traffic"
    )
    if json_target:
        targets = {name: None if path is None else str(path) for name, path in (("output", output), ("inputs", inputs))}
        write_json(json_target, {**targets, "tokens": tokens, "hottest_share": shares, **launch.report()})


def _tap_inputs(launch: Launch, fingerprint: str, tokens: int, target: Path) -> InputsWriter:
    """Have every forward pass write down what experts are given."""
    writer = InputsWriter(target, fingerprint, launch.runtime.experts.shape, tokens)
    launch.runtime.tap = lambda layer, call: writer.add(layer, call.hidden, call.ids, call.weights)
    return writer


def _measure(
    launch: Launch, streams: list[list[int]], window: int, signal: str, progress: Callable[[int, int], None]
) -> tuple[TrafficMeter, int]:
    meter = TrafficMeter(launch.runtime.experts.shape, signal)
    launch.runtime.listener = meter
    total, done = sum(map(len, streams)), 0
    with torch.inference_mode():
        for ids in streams:
            for start in range(0, len(ids), window):
                part = ids[start : start + window]
                launch.model(torch.tensor([part]), use_cache=False, logits_to_keep=1)
                done += len(part)
                progress(done, total)
    return meter, done


def _sensitivity_windows(streams: list[list[int]], window: int) -> list[list[int]]:
    """Windows of at most `window` tokens from all over every text."""
    share = max(1, SENSITIVITY_TOKENS // len(streams))
    size = min(window, SENSITIVITY_WINDOW, share)
    count = -(-share // size)
    steps = [max(size, len(ids) // count) for ids in streams]
    return [
        ids[start : start + size]
        for ids, step in zip(streams, steps, strict=True)
        for start in range(0, len(ids), step)[:count]
    ]


def _share(meter: TrafficMeter, share: float) -> float:
    """Part of all traffic that the hottest `share` of each layer's experts takes."""
    ranked = np.sort(meter.sums, 1)
    count = max(1, round(share * ranked.shape[1]))
    return float(ranked[:, -count:].sum() / ranked.sum())
