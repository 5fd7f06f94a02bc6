"""POST /v1/responses."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response

from dynaexq.server.conversation import prepare
from dynaexq.server.response_schemas import ResponsesBody
from dynaexq.server.response_writer import ResponseWriter
from dynaexq.server.service import Service, answer
from dynaexq.server.writers import Json


def make_router(service: Service) -> APIRouter:
    """The endpoint over one model."""
    router = APIRouter(prefix="/v1")

    @router.post("/responses")
    async def respond(body: ResponsesBody, http: Request) -> Response:
        """Answer a conversation with items."""
        service.check_model(body.model)
        asked = await asyncio.to_thread(prepare, service, body, body.messages(), body.max_output_tokens)
        writer = ResponseWriter(_describe_request(body), asked.make_parser())
        return await answer(service, writer, body.stream, asked.wishes, http)

    return router


def _describe_request(body: ResponsesBody) -> Json:
    """What a response says of its request; `store` and what goes with it are as on every server without one."""
    choice, written = body.tool_choice, body.text
    return {
        "model": body.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [tool.model_dump() for tool in body.tools or []],
        "tool_choice": choice.model_dump() if choice is not None and not isinstance(choice, str) else choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"}} if written is None else written.model_dump(by_alias=True),
        "metadata": body.metadata or {},
        "user": body.user,
        "store": False,
        "previous_response_id": None,
        "background": False,
        "truncation": "disabled",
    }
