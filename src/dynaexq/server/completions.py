"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dynaexq.engine import Constraint
from dynaexq.server.chat_schemas import ChatBody
from dynaexq.server.choice_writers import ChatWriter, ChoicesWriter, Style, TextWriter
from dynaexq.server.conversation import prepare
from dynaexq.server.schemas import CompletionBody
from dynaexq.server.service import Service, answer

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions."""

CHAT = Style("chatcmpl", "chat.completion", "chat.completion.chunk")
TEXT = Style("cmpl", "text_completion", "text_completion")


def make_router(service: Service) -> APIRouter:
    """The endpoints over one model."""
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions")
    async def chat(body: ChatBody, http: Request) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        messages = [message.as_template() for message in body.messages]
        asked = await asyncio.to_thread(prepare, service, body, messages, body.limit, body.alternatives)
        choices = [ChatWriter(i, service.decode, asked.make_parser()) for i in range(len(asked.wishes))]
        writer = ChoicesWriter(CHAT, service.name, choices, body.wants_usage)
        return await answer(service, writer, body.stream, asked.wishes, http)

    @router.post("/completions")
    async def complete(body: CompletionBody, http: Request) -> Response:
        """Continue a text, or several."""
        service.check_model(body.model)
        limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        prompts = await asyncio.to_thread(_encode_prompts, service, body)

        def start_grammar() -> Constraint | None:
            return None if body.form is None else service.grammars.start(body.form)

        wishes = await asyncio.to_thread(
            service.make_wishes, body, prompts, limit, body.logprobs, start_grammar, body.scores
        )
        echoes = [service.decode(list(wish.prompt)) if body.echo else "" for wish in wishes]
        choices = [TextWriter(i, service.decode, echo) for i, echo in enumerate(echoes)]
        writer = ChoicesWriter(TEXT, service.name, choices, body.wants_usage)
        return await answer(service, writer, body.stream, wishes, http)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """The one model."""
        return {"object": "list", "data": [_describe_model(service)]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The one model, by name."""
        service.check_model(name)
        return _describe_model(service)

    return router


def _describe_model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "dynaexq",
        "max_model_len": service.engine.model.room,
    }


def _encode_prompts(service: Service, body: CompletionBody) -> list[tuple[int, ...]]:
    prompt = body.prompt
    several: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)
    return [_encode_text(service, each) if isinstance(each, str) else tuple(each) for each in several]


def _encode_text(service: Service, text: str) -> tuple[int, ...]:
    with service.encoding:
        service.encoder.check_length([text], service.engine.model.room)
        return service.encoder.encode(text)
