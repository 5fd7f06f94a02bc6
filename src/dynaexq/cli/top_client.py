"""Asks a server for its state."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from dynaexq.cli.serve import API_KEY_VARIABLE
from dynaexq.cli.top_state import ServerState, clean
from dynaexq.core import OptionError

TIMEOUT_SECONDS = 5.0
MAX_BYTES = 64 << 20
PATIENCE_SECONDS, MAX_TRACE_BYTES = 30.0, 1 << 30


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        """None: an error like every other answer that is no state."""


class StateClient:
    """Asks one server. Raises OptionError with the way out: what is wrong is the address or the key."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._key = api_key
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
        if not _is_address(self.url):
            raise OptionError(f"{url!r} is not a server's address; give it as http://HOST:PORT")
        if api_key is not None and not (api_key.strip() and api_key.isprintable() and max(api_key) <= "\xff"):
            raise OptionError(f"the API key is empty or cannot be sent; check --api-key and {API_KEY_VARIABLE}")

    def fetch(self) -> tuple[ServerState, dict[str, Any]]:
        """The state, and the JSON it came as."""
        text = self._get()
        try:
            sent: dict[str, Any] = json.loads(text, parse_constant=_refuse_constant)
            return ServerState.model_validate(sent), sent
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "state"
            raise self._stranger(clean(f"{place}: {first['msg']}")) from None
        except (ValueError, RecursionError):
            raise self._stranger("/state is not JSON") from None

    def fetch_trace(self, seconds: float) -> bytes:
        """Have the server record for so long: the trace. The key is the admin key."""
        body = json.dumps({"seconds": seconds}).encode()
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/admin/trace", body, headers)
        try:
            with self._opener.open(request, timeout=seconds + PATIENCE_SECONDS) as answer:
                data: bytes = answer.read(MAX_TRACE_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise self._told(error) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(getattr(error, "reason", error)) from None
        if len(data) > MAX_TRACE_BYTES:
            raise OptionError(f"the trace is larger than {MAX_TRACE_BYTES >> 20} MiB; record for fewer seconds")
        return data

    def _told(self, error: urllib.error.HTTPError) -> OptionError:
        """What the server says of a request that it refuses."""
        if error.code in (401, 403):
            return OptionError(f"{self.url} does not take this admin key; see --admin-key of `dynaexq serve`")
        try:
            return OptionError(f"{self.url}: {clean(json.loads(error.read(1 << 16))['error']['message'])}")
        except (ValueError, KeyError, TypeError, OSError):
            return self._stranger(f"/admin/trace answers {error.code}")

    def _get(self) -> bytes:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        request = urllib.request.Request(f"{self.url}/state", headers=headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                text: bytes = answer.read(MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(getattr(error, "reason", error)) from None
        if len(text) > MAX_BYTES:
            raise self._stranger(f"/state is larger than {MAX_BYTES >> 20} MiB")
        return text

    def _refused(self, code: int) -> OptionError:
        if code == 401 and self._key:
            return OptionError(f"{self.url} does not take this key; check --api-key and {API_KEY_VARIABLE}")
        if code == 401:
            return OptionError(f"{self.url} wants a key; give --api-key or set {API_KEY_VARIABLE}")
        return self._stranger(f"/state answers {code}")

    def _unreachable(self, reason: object) -> OptionError:
        if isinstance(reason, TimeoutError):
            return OptionError(f"{self.url} does not answer within {TIMEOUT_SECONDS:g} s; is the server well?")
        if isinstance(reason, ConnectionRefusedError):
            return OptionError(f"nothing listens at {self.url}; start `dynaexq serve`, or give the address it printed")
        if isinstance(reason, http.client.HTTPException):
            return self._stranger("it does not speak HTTP")
        text = getattr(reason, "strerror", None) or reason
        return OptionError(f"cannot reach {self.url}: {text}; give the address that `dynaexq serve` printed")

    def _stranger(self, why: str) -> OptionError:
        return OptionError(f"{self.url} is not a DynaExq server of this version ({why}); give the address of one")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    plain = url.isascii() and url.isprintable() and " " not in url
    return named and plain and not (parts.username or parts.query or parts.fragment)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
