"""The model behind the endpoints, and what is done with an answer whichever endpoint asked."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from dynaexq.engine import Constraint, Engine
from dynaexq.integrations.grammar import Delayed, Grammars
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.server.answers import Answers, Wish
from dynaexq.server.errors import ApiError, api_error
from dynaexq.server.parsing import THINK, Conventions
from dynaexq.server.schemas import SamplingBody
from dynaexq.server.writers import ChoiceWriter, Json

KEEP_ALIVE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
CLIENT_LEFT = 499


@dataclass(frozen=True)
class Service:
    """A running model by its name."""

    name: str
    engine: Engine
    encoder: PromptEncoder
    created: int

    @cached_property
    def conventions(self) -> Conventions:
        """How the model marks thoughts and tool calls."""
        return Conventions.of(self.encoder.tokenizer.chat_template)

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars over the model's tokens (a second's work, done when first needed)."""
        return Grammars(self.encoder.tokenizer, self.engine.model.vocabulary, self.encoder.stop_tokens)

    def check_model(self, name: str) -> None:
        """Raise ApiError unless the model that is asked for is this one."""
        if name != self.name:
            message = f"the model '{name}' is not here; this server has '{self.name}'"
            raise ApiError(404, message, "model", "model_not_found")

    def make_wishes(
        self,
        body: SamplingBody,
        prompts: list[tuple[int, ...]],
        limit: int | None,
        logprobs: int | None,
        thinks_first: bool = False,
    ) -> list[Wish]:
        """One wish for each prompt and choice; without a limit, answers may fill the room.

        Where the model thinks first, a grammar begins with the answer. Raises OptionError for a grammar that cannot be
        enforced.
        """
        wishes = []
        for prompt in prompts:
            most = max(self.engine.model.room - len(prompt), 1) if limit is None else limit
            for choice in range(body.n):
                sampling, constraint = body.sampling(choice, logprobs), self._constraint(body, thinks_first)
                wishes.append(Wish(prompt, most, sampling, tuple(body.stops), body.priority, constraint))
        return wishes

    def _constraint(self, body: SamplingBody, thinks_first: bool) -> Constraint | None:
        constraint = body.constraint(lambda: self.grammars)
        end = self.encoder.find_token(THINK.closing) if thinks_first and THINK.closing else None
        return constraint if constraint is None or end is None else Delayed(constraint, end)


class Style(NamedTuple):
    """How an endpoint writes answers: prefix of ids, objects' names, and a writer for each choice."""

    prefix: str
    kind: str
    chunk_kind: str
    make_writer: Callable[[int], ChoiceWriter]


async def answer(service: Service, style: Style, body: SamplingBody, wishes: list[Wish], http: Request) -> Response:
    """Submit wishes and write the answer, whole or as a stream. A client that leaves cancels what runs."""
    answers = Answers(service.engine, service.encoder, wishes)
    writers = [style.make_writer(index) for index in range(len(wishes))]
    head = {"id": f"{style.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.name}
    if body.stream:
        wants_usage = body.stream_options is not None and body.stream_options.include_usage
        lines = _stream(answers, writers, {**head, "object": style.chunk_kind}, wants_usage)
        return StreamingResponse(lines, media_type="text/event-stream", headers=KEEP_ALIVE)
    await _collect(answers, writers, http)
    choices = [writer.whole() for writer in writers]
    return JSONResponse({**head, "object": style.kind, "choices": choices, "usage": answers.usage.as_json()})


async def _stream(answers: Answers, writers: list[ChoiceWriter], head: Json, wants_usage: bool) -> AsyncIterator[str]:
    def line(choices: list[Json], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more}, ensure_ascii=False)}\n\n"

    empty = {"usage": None} if wants_usage else {}
    try:
        for writer in writers:
            for chunk in writer.begin():
                yield line([chunk], **empty)
        async for piece in answers:
            for chunk in writers[piece.index].add(piece):
                yield line([chunk], **empty)
        if wants_usage:
            yield line([], usage=answers.usage.as_json())
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status line is gone: the error is the stream's last event
        yield f"data: {json.dumps(api_error(error).body())}\n\n"
    finally:
        answers.cancel()


async def _collect(answers: Answers, writers: list[ChoiceWriter], http: Request) -> None:
    async def read() -> None:
        async for piece in answers:
            writers[piece.index].add(piece)

    reading, leaving = asyncio.create_task(read()), asyncio.create_task(_wait_for_departure(http))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise ApiError(CLIENT_LEFT, "the client has left")
        await reading
    finally:
        answers.cancel()
        reading.cancel()
        leaving.cancel()


async def _wait_for_departure(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
