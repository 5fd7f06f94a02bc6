"""A model to talk to from Python: what the command line and the server build on."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynaexq.core import DynaExqError, OptionError
from dynaexq.engine import (
    Engine,
    EngineOptions,
    Event,
    Finish,
    FinishEvent,
    Observer,
    Request,
    Sampling,
    ScoredEvent,
    Scores,
    TokenEvent,
)
from dynaexq.engine.text import AnswerText
from dynaexq.engine.token_scheduler import TokenScheduler
from dynaexq.integrations.transformers.kept import kept_dtype
from dynaexq.integrations.transformers.prompts import Message, PromptEncoder
from dynaexq.integrations.transformers.sampling import TransformersWarper
from dynaexq.integrations.transformers.slot_model import SlottedModel
from dynaexq.kernels.threads import keep_numpy_single
from dynaexq.launch import Launch, Opened
from dynaexq.launch_options import DTYPES, LaunchOptions
from dynaexq.plan.memory import Workload
from dynaexq.plan.sizes import parse_size
from dynaexq.policy.regrouping import FEW, RegroupingOptions
from dynaexq.runtime import ExpertRuntime
from dynaexq.store.sources import Progress

DEFAULT_CONTEXT = 4096
SIZES = ("memory", "expert_memory")


@dataclass(frozen=True)
class Answer:
    """A finished answer. `stopped` is the stop string that ended it, if one did."""

    text: str
    tokens: tuple[int, ...]
    finish: FinishEvent
    stopped: str | None = None


class GenerationError(DynaExqError):
    """A request failed while it ran."""


def size_workload(
    most: int, slots: int, context: int | None, kv_dtype: str | None, limits: EngineOptions, dtype: str
) -> Workload:
    """What an engine with these limits amounts to, on a model whose context is `most` tokens.

    Raises:
        OptionError: a context or a number of slots that cannot be had, or options out of range.
    """
    limits.check()
    if slots < 1 or (context is not None and not 1 < context <= most):
        raise OptionError(f"slots is {slots} and context {context}; at least 1, and 2 to {most}")
    room = min(context or DEFAULT_CONTEXT, most)
    kept = kept_dtype(kv_dtype, DTYPES[dtype])
    return Workload(
        tokens=min(max(limits.chunk, limits.step_tokens), room) + slots,
        context=room,
        sequences=slots,
        logits=max(slots, min(limits.score_tokens, room)) + 1,
        element_bytes=DTYPES[dtype].itemsize,
        kv_cache=True,
        kv_element_bytes=kept.itemsize,
        kv_scale_bytes=4 if kept is torch.int8 else 0,
    )


def check_sequences(options: LaunchOptions, slots: int) -> None:
    """Raise OptionError where sequences would be regrouped, but there are too few of them."""
    options.check()
    if options.regrouping.admit_window > 1 and slots == 1:
        raise OptionError("admit_window does nothing with one sequence at a time; leave it out")
    if options.regrouping.groups and slots <= FEW:
        raise OptionError(
            f"--granularity {options.granularity} does nothing with {slots} sequence{'s' * (slots > 1)} at a time: so "
            f"few always run together; leave it out, or serve with --slots {FEW + 1} or more"
        )


def schedule_tokens(runtime: ExpertRuntime, options: RegroupingOptions, slots: int) -> TokenScheduler | None:
    """What decides which sequences run together; None where all experts are resident."""
    if runtime.cache is None:
        return None
    scheduler = TokenScheduler(options, runtime.experts.shape, slots, runtime.cache.map.capacity)
    if options.learns:
        runtime.watcher = scheduler
        keep_numpy_single()
    return scheduler


class LLM:
    """A model loaded within a memory limit, with `slots` sequences at a time of up to `context` tokens.

    with LLM("./Qwen3-30B-A3B", memory="12G") as llm:
        print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}]).text)
    """

    def __init__(
        self,
        model: str | Opened,
        *,
        slots: int = 4,
        context: int | None = None,
        kv_dtype: str | None = None,
        engine: EngineOptions | None = None,
        observer: Observer | None = None,
        progress: Progress | None = None,
        options: LaunchOptions | None = None,
        **launch: Any,
    ) -> None:
        """Plan, prepare what the plan calls for, load, and start the engine.

        `kv_dtype` is what keys and values are kept in: float32, float16, bfloat16 or int8; None is the model's own.
        `launch` are options of `LaunchOptions` by name, such as `mode`, `tier`, and `memory` in bytes or as "12G".

        Raises:
            OptionError, MemoryLimitError, StoreError, CheckpointError, UnsupportedModelError: as the parts do.
        """
        assert options is None or not launch
        sizes = {name: parse_size(launch[name], name) for name in SIZES if isinstance(launch.get(name), str)}
        options = options or LaunchOptions(**{**launch, **sizes})
        limits = engine or EngineOptions()
        opened = Opened(model) if isinstance(model, str) else model
        work = size_workload(opened.skeleton.profile.max_context, slots, context, kv_dtype, limits, options.dtype)
        room = work.context
        check_sequences(options, slots)
        self.launch: Launch = opened.launch(options, opened.plan(options, work), progress or (lambda *_: None))
        self.encoder = PromptEncoder(opened.tokenizer, self.launch.model.generation_config)
        slotted = SlottedModel(self.launch.model, slots, room, kv_dtype)
        scheduler = schedule_tokens(self.launch.runtime, options.regrouping, slots)
        self.engine = Engine(slotted, TransformersWarper, limits, observer, scheduler=scheduler)
        self.engine.start()

    def generate(self, prompt: str, max_tokens: int = 128, stop: Sequence[str] = (), **sampling: Any) -> Answer:
        """Continue a text."""
        return self.submit(self.encoder.encode(prompt), max_tokens, stop, Sampling(**sampling)).wait()

    def chat(
        self, messages: Sequence[Message], max_tokens: int = 128, stop: Sequence[str] = (), **sampling: Any
    ) -> Answer:
        """Answer a conversation: messages with `role` and `content`."""
        return self.submit(self.encoder.encode_chat(messages), max_tokens, stop, Sampling(**sampling)).wait()

    def stream(
        self, messages: Sequence[Message], max_tokens: int = 128, stop: Sequence[str] = (), **sampling: Any
    ) -> Iterator[str]:
        """Pieces of an answer to a conversation as they come; closing the iterator cancels the rest."""
        yield from self.submit(self.encoder.encode_chat(messages), max_tokens, stop, Sampling(**sampling))

    def score(self, tokens: tuple[int, ...], start: int = 1, alternatives: int = 0) -> list[TokenEvent]:
        """Log-probabilities of the tokens of a text from place `start` on. Raises what `Engine.submit` raises."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.engine.submit(Request(tokens, 0, events.put, scores=Scores(alternatives, start)))
        scored: list[TokenEvent] = []
        while not isinstance(event := events.get(), FinishEvent):
            if isinstance(event, ScoredEvent):
                scored += event.tokens
        _raise_failure(event)
        return scored

    def submit(
        self, prompt: tuple[int, ...], max_tokens: int, stop: Sequence[str] = (), sampling: Sampling | None = None
    ) -> Stream:
        """Ask for an answer to a prompt of tokens. Raises what `Engine.submit` raises."""
        return Stream(self.engine, self.encoder, prompt, max_tokens, stop, sampling or Sampling())

    def close(self) -> None:
        """Cancel what runs and come to rest."""
        self.engine.close()
        self.launch.runtime.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """An answer on its way: iterate over its pieces of text, then look at `answer`."""

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        prompt: tuple[int, ...],
        max_tokens: int,
        stop: Sequence[str],
        sampling: Sampling,
    ) -> None:
        self._engine = engine
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._text = AnswerText(encoder.decode, prompt, stop)
        self._request = Request(prompt, max_tokens, self._events.put, sampling, encoder.stop_tokens)
        self.answer: Answer | None = None
        engine.submit(self._request)

    def __iter__(self) -> Iterator[str]:
        pieces: list[str] = []
        tokens: list[int] = []
        finish: FinishEvent | None = None
        try:
            while finish is None:
                event = self._events.get()
                if isinstance(event, FinishEvent):
                    finish = event
                    piece = self._text.finish()
                elif self._text.stopped is not None or isinstance(event, ScoredEvent):
                    continue  # computed before the engine heard of the stop; or not asked for
                else:
                    tokens.append(event.token)
                    piece = self._text.add(event.token)
                    if self._text.stopped is not None:
                        self._engine.cancel(self._request)
                if piece:
                    pieces.append(piece)
                    yield piece
        finally:
            if finish is None:
                self._engine.cancel(self._request)
        _raise_failure(finish)
        self.answer = Answer("".join(pieces), tuple(tokens), finish, self._text.stopped)

    def wait(self) -> Answer:
        """The whole answer, also when it was waited for before. Raises GenerationError if it failed."""
        if self.answer is None:
            for _ in self:
                pass
        assert self.answer is not None
        return self.answer


def _raise_failure(finish: FinishEvent) -> None:
    if finish.reason is Finish.FAILED:
        raise finish.cause or GenerationError(finish.error or "the request failed")
