"""Who may ask, and how much at once."""

from __future__ import annotations

import hmac
import ipaddress
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dynaexq.server.errors import ApiError

OPEN_PATHS = ("/health", "/ready", "/")
"""Asked by load balancers, which have no key, and the dashboard's page without its data; they tell nothing about
requests."""

ADMIN_PREFIX = "/admin/"


@dataclass(frozen=True)
class Limits:
    """`api_key` None lets everybody in, `admin_key` None nobody to /admin; `body_bytes` of a request at most."""

    api_key: str | None = None
    body_bytes: int = 8 << 20
    admin_key: str | None = None
    local_names: bool = False
    """Whether requests must name this machine by a local name: pages of other sites may send a browser here."""


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
        if self._limits.local_names and not is_local(_host_name(headers.get("host", "localhost"))):
            raise ApiError(403, "a server without a key answers to local names only; ask for localhost, or set a key")
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if scheme.lower() == "bearer" else ""
        if scope["path"].startswith(ADMIN_PREFIX):
            if self._limits.admin_key is None:
                raise ApiError(403, "this server was started without an admin key (--admin-key)", code="no_admin_key")
            _check_key(given, self._limits.admin_key, "admin key")
        elif self._limits.api_key is not None and scope["path"] not in OPEN_PATHS:
            _check_key(given, self._limits.api_key, "key")
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


def is_local(host: str) -> bool:
    """Whether a name or an address is this machine's own, for itself alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in ("localhost", "localhost.")


def _host_name(host: str) -> str:
    """Without the port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _check_key(given: str, key: str, what: str) -> None:
    if not hmac.compare_digest(given.encode(), key.encode()):
        raise ApiError(401, f"give the server's {what} as 'Authorization: Bearer KEY'", code="invalid_api_key")
