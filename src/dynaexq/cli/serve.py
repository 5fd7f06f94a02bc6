"""`dynaexq serve`: a model behind OpenAI's interface."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from functools import partial
from types import FrameType
from typing import Annotated

import typer
import uvicorn
import uvloop

from dynaexq.cli.options import ContextOption, KvDtypeOption, Request, takes_request
from dynaexq.cli.output import progress_bar, reports_errors, stderr
from dynaexq.core import OptionError
from dynaexq.engine import EngineOptions
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import EMBEDDED_MODEL, Opened
from dynaexq.llm import LLM
from dynaexq.plan.memory import format_bytes
from dynaexq.server.app import create_app
from dynaexq.server.limits import Limits, is_local
from dynaexq.server.metrics import Metrics
from dynaexq.server.service import Service
from dynaexq.server.state import StateView

API_KEY_VARIABLE = "DYNAEXQ_API_KEY"
ADMIN_KEY_VARIABLE = "DYNAEXQ_ADMIN_KEY"
DEFAULTS = EngineOptions()
BODY_BYTES_PER_TOKEN, LEAST_BODY_BYTES = 64, 1 << 18
"""Several times what text takes, escapes and JSON around it included: what is longer cannot fit the model's room."""

FORCED_SECONDS = 5.0
"""Between telling answers to end, once their time is up, and closing connections."""


@reports_errors
@takes_request(drive="thread")
def serve(
    request: Request,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=API_KEY_VARIABLE, help="Key that clients must give.", show_default=False, show_envvar=True),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar=ADMIN_KEY_VARIABLE,
            help="Key to /admin, which is closed without one.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    no_api_key: Annotated[
        bool, typer.Option("--no-api-key", help="Listen beyond this machine without a key, knowingly.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests. [default: its directory's]", show_default=False)
    ] = None,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Sequences that run at a time.")] = 4,
    context: ContextOption = None,
    kv_dtype: KvDtypeOption = None,
    step_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one step: what a long prompt may hold up the others.")
    ] = DEFAULTS.step_tokens,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = DEFAULTS.queue,
    reuse: Annotated[bool, typer.Option("--reuse/--no-reuse", help="Reuse beginnings of prompts.")] = DEFAULTS.reuse,
    max_body: Annotated[
        int | None,
        typer.Option(
            min=1024,
            help=f"Bytes of a request's body at most. [default: {BODY_BYTES_PER_TOKEN} for each token of --context]",
            show_default=False,
        ),
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="Origin of web pages that may ask; repeatable.", show_default=False)
    ] = None,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that running answers get at shutdown.")] = 30.0,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models;
    with a dashboard at /, and /state, /metrics, /ready, and /admin for operators.

    Examples:

      dynaexq serve --demo

      dynaexq serve ./store --memory 12G --slots 8 --context 8192

      DYNAEXQ_API_KEY=secret dynaexq serve ./store --host 0.0.0.0
    """
    check_exposure(host, api_key, no_api_key)
    check_admin_key(admin_key, api_key)
    check_names(name, cors or [])
    listener = listen(host, port)
    quiet_transformers()
    chunk = min(step_tokens, DEFAULTS.chunk)
    limits = EngineOptions(step_tokens=step_tokens, chunk=chunk, queue=queue, reuse=reuse)
    opened, metrics = Opened(request.model), Metrics()
    with progress_bar() as progress:
        llm = LLM(
            opened,
            slots=slots,
            context=context,
            kv_dtype=kv_dtype,
            engine=limits,
            observer=metrics,
            options=request.options,
            progress=progress,
        )
    with llm:
        metrics.watch(llm.engine, llm.launch.runtime)
        own = "demo" if request.model == str(EMBEDDED_MODEL) else opened.root.resolve().name
        service = Service(name or own, llm.engine, llm.encoder, int(time.time()))
        record = partial(opened.record, llm.launch.runtime) if request.options.memory is None else None
        view = StateView(service, llm.launch.runtime, metrics.pace, record)
        body = max_body or max(BODY_BYTES_PER_TOKEN * llm.engine.model.room, LEAST_BODY_BYTES)
        rules = Limits(api_key, body, admin_key, local_names=api_key is None and is_local(host))
        app = create_app(service, metrics, rules, view, cors or ())
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=round(drain + FORCED_SECONDS)
        )
        address, plan = f"http://{host}:{listener.getsockname()[1]}", llm.launch.plan
        stderr.print(
            f"{service.name}: {plan.mode}, experts at {plan.tiers}, {format_bytes(plan.expert_bytes)}; planned "
            f"{format_bytes(plan.total)} of {format_bytes(plan.limit)}; {slots} sequences of {llm.engine.model.room} "
            f"tokens; listening on {address}/v1, dashboard at {address}"
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(Server(config, llm, drain).serve([listener]))
    llm.launch.check_memory()


class Server(uvicorn.Server):
    """Lets running answers end before it goes; a second signal does not wait for them."""

    def __init__(self, config: uvicorn.Config, llm: LLM, drain: float) -> None:
        """`drain`: seconds that running answers get; then they are told that the server goes."""
        super().__init__(config)
        self._llm, self._drain = llm, drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal is how a server is told to go: no error, and none to raise again."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Go too when the engine has ended by itself."""
        return await super().on_tick(counter) or self._llm.engine.ended

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, wait for answers, close."""
        self._llm.engine.drain()
        loop = asyncio.get_running_loop()
        ending = loop.call_later(self._drain, lambda: loop.run_in_executor(None, self._llm.engine.close))
        await super().shutdown(sockets)
        ending.cancel()


def check_exposure(host: str, api_key: str | None, without: bool) -> None:
    """Raise OptionError for an address that others can reach without a key, unless that is wanted."""
    if api_key is not None and not api_key.strip():
        raise OptionError(f"the API key is empty; leave out --api-key and {API_KEY_VARIABLE}, or give one")
    if api_key is not None and without:
        raise OptionError("--no-api-key and an API key are given; leave one out")
    if is_local(host):
        if without:
            raise OptionError(f"--no-api-key does nothing on {host}; leave it out")
    elif api_key is None and not without:
        raise OptionError(
            f"{host} can be reached from other machines; set {API_KEY_VARIABLE}, or say --no-api-key to go without"
        )


def check_names(name: str | None, origins: list[str]) -> None:
    """Raise OptionError for a model's name that nobody can type, or an origin that no browser sends."""
    if name is not None and not (name.strip() and name.isprintable()):
        raise OptionError(f"--name {name!r} is empty, or has characters that cannot be printed")
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+", origin):
            raise OptionError(f"--cors {origin!r} is no origin; write https://HOST or http://HOST:PORT, without a path")


def check_admin_key(admin_key: str | None, api_key: str | None) -> None:
    """Raise OptionError for an admin key that keeps nobody out."""
    if admin_key is not None and not admin_key.strip():
        raise OptionError(f"the admin key is empty; leave out --admin-key and {ADMIN_KEY_VARIABLE}, or give one")
    if admin_key is not None and admin_key == api_key:
        raise OptionError("--admin-key is the API key, so that every client is an admin; give another")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, before anything is loaded. Raises OptionError where that does not work."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(os.cpu_count() or 1)
    except OSError as error:
        raise OptionError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener
