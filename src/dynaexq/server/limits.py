"""Who may ask, and how much at once."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynaexq.server.errors import ApiError

OPEN_PATHS = ("/health", "/ready")
"""Asked by load balancers, which have no key; they tell nothing about requests."""


@dataclass(frozen=True)
class Limits:
    """`api_key` None lets everybody in; `body_bytes` of a request at most."""

    api_key: str | None = None
    body_bytes: int = 8 << 20


class Gate:
    """Refuses requests without the key, and bodies that are too large, before anything reads them."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            self._check(scope)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        await self._app(scope, self._counting(receive), send)

    def _check(self, scope: Scope) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        key = self._limits.api_key
        if key is not None and scope["path"] not in OPEN_PATHS:
            given = headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), key.encode()):
                raise ApiError(401, "give the server's key as 'Authorization: Bearer KEY'", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limits.body_bytes:
            raise self._too_large()

    def _counting(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limits.body_bytes:
                raise HTTPException(413, self._too_large().message)  # the only kind that passes through body parsers
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._limits.body_bytes} bytes", code="body_too_large")
