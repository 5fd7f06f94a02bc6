"""The model behind the endpoints, and what is done with an answer whichever endpoint asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cached_property

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from dynaexq.engine import Constraint, Engine, Scores
from dynaexq.engine.text import Decode
from dynaexq.integrations.grammar import Grammars
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.server.answers import Answers, Wish
from dynaexq.server.errors import ApiError, api_error
from dynaexq.server.parsing import Conventions
from dynaexq.server.schemas import SamplingBody
from dynaexq.server.writers import AnswerWriter

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
    def encoding(self) -> threading.Lock:
        """One prompt is encoded at a time, so that a crowd's do not add up."""
        return threading.Lock()

    @cached_property
    def conventions(self) -> Conventions:
        """How the model marks thoughts and tool calls."""
        return Conventions.of(self.encoder.tokenizer.chat_template)

    @cached_property
    def grammars(self) -> Grammars:
        """Grammars over the model's tokens (a second's work, done when first needed)."""
        return Grammars(self.encoder.tokenizer, self.engine.model.vocabulary, self.encoder.stop_tokens)

    @cached_property
    def decode(self) -> Decode:
        """Text of an answer: special tokens are left out, but not those that mark thoughts and calls."""
        encoder = self.encoder
        marks = {token for mark in self.conventions.marks if (token := encoder.find_token(mark)) is not None}
        if all(encoder.decode([token]) for token in marks):
            return encoder.decode
        added = encoder.tokenizer.added_tokens_decoder
        hidden = {token for token, about in added.items() if about.special} - marks
        return lambda tokens: encoder.decode_all([token for token in tokens if token not in hidden])

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
        start_grammar: Callable[[], Constraint | None],
        scores: Scores | None = None,
    ) -> list[Wish]:
        """One wish for each prompt and choice, with its own grammar; without a limit, answers may fill the room."""
        wishes, ends = [], frozenset[int]() if body.ignore_eos else self.encoder.stop_tokens
        for prompt in prompts:
            most = max(self.engine.model.room - len(prompt), 1) if limit is None else limit
            for choice in range(body.choices):
                sampling, stops = body.sampling(choice, logprobs), tuple(body.stops)
                wishes.append(Wish(prompt, most, sampling, stops, ends, body.priority, start_grammar(), scores))
        return wishes


async def answer(service: Service, writer: AnswerWriter, stream: bool, wishes: list[Wish], http: Request) -> Response:
    """Submit wishes and write the answer, whole or as a stream. A client that leaves cancels what runs."""
    answers = Answers(service.engine, service.decode, wishes)
    if stream:
        return StreamingResponse(_stream(answers, writer), media_type="text/event-stream", headers=KEEP_ALIVE)
    await _collect(answers, writer, http)
    return JSONResponse(writer.whole(answers.usage))


async def _stream(answers: Answers, writer: AnswerWriter) -> AsyncIterator[str]:
    try:
        for event in writer.begin():
            yield writer.frame(event)
        async for piece in answers:
            for event in writer.add(piece):
                yield writer.frame(event)
        for event in writer.end(answers.usage):
            yield writer.frame(event)
        yield writer.ending
    except Exception as error:  # the status line is gone: the error is the stream's last event
        for event in writer.fail(api_error(error)):
            yield writer.frame(event)
    finally:
        answers.cancel()


async def _collect(answers: Answers, writer: AnswerWriter, http: Request) -> None:
    async def read() -> None:
        async for piece in answers:
            writer.add(piece)

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
