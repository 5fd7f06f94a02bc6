"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.server.errors import ApiError
from dynaexq.server.schemas import ChatBody, CompletionBody
from dynaexq.server.service import Service, Style, answer
from dynaexq.server.writers import ChatWriter, TextWriter

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions."""

PROMPT_END_TOKENS = 8
"""Enough to see whether a template has opened the model's thoughts."""


def make_router(service: Service) -> APIRouter:
    """The endpoints over one model."""
    router = APIRouter(prefix="/v1")
    encoder = service.encoder

    @router.post("/chat/completions")
    async def chat(body: ChatBody, http: Request) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        tools = _offered_tools(service, body)
        messages = [message.as_template() for message in body.messages]
        prompt = await asyncio.to_thread(encoder.encode_chat, messages, tools, **body.chat_template_kwargs)
        prompt_end = encoder.decode_all(list(prompt[-PROMPT_END_TOKENS:]))
        thinks = service.conventions.thinks_first(prompt_end)
        wishes = await asyncio.to_thread(service.make_wishes, body, [prompt], body.limit, body.alternatives, thinks)

        def make_writer(index: int) -> ChatWriter:
            return ChatWriter(index, encoder, service.conventions.parser(prompt_end, bool(tools)))

        style = Style("chatcmpl", "chat.completion", "chat.completion.chunk", make_writer)
        return await answer(service, style, body, wishes, http)

    @router.post("/completions")
    async def complete(body: CompletionBody, http: Request) -> Response:
        """Continue a text, or several."""
        service.check_model(body.model)
        prompts = await asyncio.to_thread(_encode_prompts, encoder, body)
        limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        wishes = await asyncio.to_thread(service.make_wishes, body, prompts, limit, body.logprobs)
        style = Style("cmpl", "text_completion", "text_completion", lambda index: TextWriter(index, encoder))
        return await answer(service, style, body, wishes, http)

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


def _encode_prompts(encoder: PromptEncoder, body: CompletionBody) -> list[tuple[int, ...]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [encoder.encode(prompt)]
    if isinstance(prompt[0], int):
        return [tuple(prompt)]
    return [encoder.encode(text) for text in prompt]


def _offered_tools(service: Service, body: ChatBody) -> list[dict[str, Any]] | None:
    """Tools as templates take them. Raises ApiError where the model has no way to call one."""
    if not body.tools or body.tool_choice == "none":
        return None
    if service.conventions.call is None:
        raise ApiError(400, "the model's chat template has no form of tool calls that this server reads", "tools")
    return [tool.model_dump(exclude_none=True) for tool in body.tools]
