"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dynaexq.core import CheckpointError, DynaExqError, OptionError
from dynaexq.engine import EngineClosedError, QueueFullError, TooLongError

logger = logging.getLogger("dynaexq.server")
RETRY_SECONDS = 5
TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry = status, message, param, code, retry

    def body(self) -> dict[str, Any]:
        """The JSON of it."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = {} if self.retry is None else {"Retry-After": str(self.retry)}
        return JSONResponse(self.body(), self.status, headers)


ANSWERS: dict[type[DynaExqError], tuple[int, str | None, str | None, int | None]] = {
    TooLongError: (400, None, "context_length_exceeded", None),
    QueueFullError: (429, None, "queue_full", RETRY_SECONDS),
    EngineClosedError: (503, None, "shutting_down", RETRY_SECONDS),
    OptionError: (400, None, None, None),
    CheckpointError: (400, None, None, None),  # a chat template that fails on these messages
    DynaExqError: (500, None, None, None),
}
"""Status, parameter, code and seconds to wait; the first that fits."""


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error."""
    if isinstance(error, ApiError):
        return error
    for kind, (status, param, code, retry) in ANSWERS.items():
        if isinstance(error, kind):
            return ApiError(status, str(error), param, code, retry)
    logger.exception("unexpected error", exc_info=error)
    return ApiError(500, f"unexpected {type(error).__name__}; the server's log says more")


def validation_error(error: RequestValidationError) -> ApiError:
    """What is wrong with a body, by the name of the parameter."""
    first = _most_telling(error.errors())
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON")
    if first["loc"] == ("body",) and first["type"] in ("model_attributes_type", "dict_type"):
        return ApiError(400, "the body must be a JSON object, sent with 'Content-Type: application/json'")
    place = _find_place(first, error.body)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unsupported parameter: {place}", place, "unsupported_parameter")
    return ApiError(400, f"{place or 'body'}: {first['msg'].removeprefix('Value error, ')}", place or None)


def _most_telling(errors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the first parameter's errors the deepest, which is of the form that was meant where several are allowed. A
    wrong kind explains the others."""
    parameter = errors[0]["loc"][:2]
    mine = [error for error in errors if error["loc"][:2] == parameter]
    return max(reversed(mine), key=lambda error: (len(error["loc"]), error["type"] == "literal_error"))


def _find_place(error: dict[str, Any], body: Any) -> str:
    """The path in the body: locations name the forms that were tried, too."""
    path, value = [], body
    for part in error["loc"][1:]:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and part in range(len(value))):
            path.append(str(part))
            value = value[part]
    if error["type"] == "missing":
        path.append(str(error["loc"][-1]))
    return ".".join(path)


def install(app: FastAPI) -> None:
    """Give `app` the handlers."""

    @app.exception_handler(RequestValidationError)
    async def on_validation(_: Request, error: RequestValidationError) -> JSONResponse:
        return validation_error(error).response()

    @app.exception_handler(HTTPException)
    async def on_http(_: Request, error: HTTPException) -> JSONResponse:
        code = "body_too_large" if error.status_code == 413 else None
        return ApiError(error.status_code, str(error.detail), code=code).response()

    @app.exception_handler(Exception)
    @app.exception_handler(ApiError)
    @app.exception_handler(DynaExqError)
    async def on_error(_: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()
