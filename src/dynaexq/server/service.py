"""The model behind the endpoints, and what is done with an answer whichever endpoint asked."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from dynaexq.engine import Engine, TokenEvent
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.server.answers import Answers, Piece, Usage, Wish
from dynaexq.server.errors import ApiError, api_error
from dynaexq.server.schemas import SamplingBody

KEEP_ALIVE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True)
class Service:
    """A running model by its name."""

    name: str
    engine: Engine
    encoder: PromptEncoder
    created: int

    def check_model(self, name: str) -> None:
        """Raise ApiError unless the model that is asked for is this one."""
        if name != self.name:
            raise ApiError(
                404, f"the model '{name}' is not here; this server has '{self.name}'", "model", "model_not_found"
            )

    def make_wishes(
        self, body: SamplingBody, prompts: list[tuple[int, ...]], limit: int | None, logprobs: int | None
    ) -> list[Wish]:
        """One wish for each prompt and choice; without a limit, answers may fill the room."""
        wishes = []
        for prompt in prompts:
            most = max(self.engine.model.room - len(prompt), 1) if limit is None else limit
            wishes += [
                Wish(prompt, most, body.sampling(choice, logprobs), tuple(body.stops), body.priority)
                for choice in range(body.n)
            ]
        return wishes


class Style(NamedTuple):
    """How an endpoint writes answers: ids, and objects of a stream's chunk and of a whole answer's choices."""

    prefix: str
    kind: str
    chunk_kind: str
    first: Callable[[int], dict[str, Any]] | None
    chunk: Callable[[Piece], dict[str, Any]]
    whole: Callable[[int, str, list[TokenEvent], str], dict[str, Any]]


async def answer(service: Service, style: Style, body: SamplingBody, wishes: list[Wish], http: Request) -> Response:
    """Submit wishes and write the answer, whole or as a stream. A client that leaves cancels what runs."""
    answers = Answers(service.engine, service.encoder, wishes)
    head = {"id": f"{style.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.name}
    if body.stream:
        wants_usage = body.stream_options is not None and body.stream_options.include_usage
        lines = _stream(answers, style, {**head, "object": style.chunk_kind}, len(wishes), wants_usage)
        return StreamingResponse(lines, media_type="text/event-stream", headers=KEEP_ALIVE)
    choices, usage = await _collect(answers, style, len(wishes), http)
    return JSONResponse({**head, "object": style.kind, "choices": choices, "usage": usage.as_json()})


async def _stream(
    answers: Answers, style: Style, head: dict[str, Any], count: int, wants_usage: bool
) -> AsyncIterator[str]:
    def line(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'choices': choices, **more}, ensure_ascii=False)}\n\n"

    empty = {"usage": None} if wants_usage else {}
    try:
        for index in range(count) if style.first else ():
            assert style.first is not None
            yield line([style.first(index)], **empty)
        async for piece in answers:
            yield line([style.chunk(piece)], **empty)
        if wants_usage:
            yield line([], usage=answers.usage.as_json())
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status line is gone: the error is the stream's last event
        yield f"data: {json.dumps(api_error(error).body())}\n\n"
    finally:
        answers.cancel()


async def _collect(answers: Answers, style: Style, count: int, http: Request) -> tuple[list[dict[str, Any]], Usage]:
    texts, tokens, reasons = [""] * count, [[] for _ in range(count)], [""] * count  # type: ignore[var-annotated]

    async def read() -> None:
        async for piece in answers:
            texts[piece.index] += piece.text
            tokens[piece.index] += piece.tokens
            reasons[piece.index] = piece.finish or ""

    reading = asyncio.create_task(read())
    leaving = asyncio.create_task(_wait_for_departure(http))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise ApiError(499, "the client has left")
        await reading
    finally:
        answers.cancel()
        reading.cancel()
        leaving.cancel()
    return [style.whole(i, texts[i], tokens[i], reasons[i]) for i in range(count)], answers.usage


async def _wait_for_departure(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
