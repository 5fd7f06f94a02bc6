"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dynaexq.engine import TokenEvent
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.server.answers import Piece
from dynaexq.server.schemas import ChatBody, CompletionBody
from dynaexq.server.service import Service, Style, answer

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions."""


def make_router(service: Service) -> APIRouter:
    """The endpoints over one model."""
    router = APIRouter(prefix="/v1")
    chat_style, plain_style = _chat_style(service.encoder), _plain_style(service.encoder)

    @router.post("/chat/completions")
    async def chat(body: ChatBody, http: Request) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        messages = [message.as_template() for message in body.messages]
        prompt = await asyncio.to_thread(service.encoder.encode_chat, messages)
        wishes = service.make_wishes(body, [prompt], body.limit, body.alternatives)
        return await answer(service, chat_style, body, wishes, http)

    @router.post("/completions")
    async def complete(body: CompletionBody, http: Request) -> Response:
        """Continue a text, or several."""
        service.check_model(body.model)
        prompts = await asyncio.to_thread(_encode_prompts, service.encoder, body)
        limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        wishes = service.make_wishes(body, prompts, limit, body.logprobs)
        return await answer(service, plain_style, body, wishes, http)

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


def _chat_style(encoder: PromptEncoder) -> Style:
    def logprobs(tokens: tuple[TokenEvent, ...] | list[TokenEvent]) -> dict[str, Any] | None:
        known = [token for token in tokens if token.logprob is not None]
        return {"content": [_chat_logprob(encoder, token) for token in known], "refusal": None} if known else None

    def first(index: int) -> dict[str, Any]:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def chunk(piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return {
            "index": piece.index,
            "delta": delta,
            "logprobs": logprobs(piece.tokens),
            "finish_reason": piece.finish,
        }

    def whole(index: int, text: str, tokens: list[TokenEvent], reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs(tokens), "finish_reason": reason}

    return Style("chatcmpl", "chat.completion", "chat.completion.chunk", first, chunk, whole)


def _plain_style(encoder: PromptEncoder) -> Style:
    def logprobs(tokens: tuple[TokenEvent, ...] | list[TokenEvent]) -> dict[str, Any] | None:
        known = [token for token in tokens if token.logprob is not None]
        if not known:
            return None
        texts = [encoder.decode([token.token]) for token in known]
        starts = [sum(map(len, texts[:i])) for i in range(len(texts))]
        best = [{encoder.decode([other.token]): other.logprob for other in token.alternatives} for token in known]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in known],
            "top_logprobs": best,
            "text_offset": starts,
        }

    def chunk(piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs(piece.tokens),
            "finish_reason": piece.finish,
        }

    def whole(index: int, text: str, tokens: list[TokenEvent], reason: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs(tokens), "finish_reason": reason}

    return Style("cmpl", "text_completion", "text_completion", None, chunk, whole)


def _chat_logprob(encoder: PromptEncoder, event: TokenEvent) -> dict[str, Any]:
    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text = encoder.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    best = [entry(other.token, other.logprob) for other in event.alternatives]
    return {**entry(event.token, event.logprob), "top_logprobs": best}
