"""A server in this process on a real socket, and plain requests to it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import uvicorn

from dynaexq.cli.serve import listen
from dynaexq.engine import Engine
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.llm import LLM
from dynaexq.server.app import create_app
from dynaexq.server.limits import Limits
from dynaexq.server.metrics import Metrics
from dynaexq.server.service import Service
from dynaexq.server.state import StateView
from dynaexq.traffic.trace_recorder import TraceRecorder


class Reply(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer that is one."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


class NoExperts:
    """Stands for the experts of a model that has none."""

    def problems(self) -> list[str]:
        """None."""
        return []


def serve_app(llm: LLM, metrics: Metrics, limits: Limits = Limits()) -> AbstractContextManager[int]:  # noqa: B008
    """The port of a server over `llm`."""
    runtime = llm.launch.runtime
    return serve_engine(
        llm.engine, llm.encoder, metrics, limits, runtime, lambda path: TraceRecorder(path, "m", "f", runtime.experts)
    )


@contextmanager
def serve_engine(
    engine: Engine,
    encoder: PromptEncoder,
    metrics: Metrics,
    limits: Limits = Limits(),  # noqa: B008
    runtime: Any = None,
    record: Any = None,
) -> Iterator[int]:
    """The port of a server over an engine that runs."""
    service = Service("demo", engine, encoder, 1)
    app = create_app(service, metrics, limits, StateView(service, runtime or NoExperts(), metrics.pace, record))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def wait_for(condition: Any, seconds: float = 60) -> None:
    """Look until it is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never came true"
        time.sleep(0.005)


def request(port: int, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    """One request; `body` is JSON unless it is bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = json.dumps(body).encode() if isinstance(body, dict) else body  # bytes, or an iterator that is sent in chunks
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    reply = Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode())
    connection.close()
    return reply
