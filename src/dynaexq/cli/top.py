"""`dynaexq top`: a running server in the terminal."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dynaexq.cli.output import reports_errors, write_json
from dynaexq.cli.serve import API_KEY_VARIABLE
from dynaexq.cli.top_client import StateClient
from dynaexq.cli.top_state import ServerState
from dynaexq.cli.top_view import show_frame
from dynaexq.core import OptionError

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_INTERVAL = 1.0


@reports_errors
def top(
    url: Annotated[str, typer.Argument(help="A server's address, as `dynaexq serve` printed it.")] = DEFAULT_URL,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=API_KEY_VARIABLE, help="The server's key.", show_default=False, show_envvar=True),
    ] = None,
    interval: Annotated[
        float | None, typer.Option(min=0.1, max=3600, help="Seconds between looks. [default: 1]", show_default=False)
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the state as JSON and leave.")] = False,
) -> None:
    """Watch a running server: memory, tiers, transitions, speed, requests. Ctrl-C leaves.

    Examples:

      dynaexq top

      dynaexq top http://127.0.0.1:9000 --interval 5

      dynaexq top --json
    """
    chosen = [name for name, given in (("--once", once), ("--json", as_json)) if given]
    if len(chosen) == 2:
        raise OptionError("--once and --json are given; leave one out")
    if chosen and interval is not None:
        raise OptionError(f"--interval does nothing with {chosen[0]}, which looks once; leave one out")
    client, console = StateClient(url, api_key), Console(highlight=False)
    if as_json:
        write_json("-", client.fetch()[1])
    elif once:
        console.print(show_frame(console, client.fetch()[0], None, whole=True))
    elif console.is_terminal:
        _watch(client, console, interval or DEFAULT_INTERVAL)
    else:
        raise OptionError("the output is not a terminal; give --once or --json")


def _watch(client: StateClient, console: Console, interval: float) -> None:
    """Frames until Ctrl-C. A server that goes away later is waited for."""
    try:
        state, _ = client.fetch()
        frame = show_frame(console, state, None, whole=False)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(frame, refresh=True)
                time.sleep(interval)
                frame, state = _look_again(client, console, state)
    except KeyboardInterrupt:
        return


def _look_again(client: StateClient, console: Console, before: ServerState) -> tuple[Group, ServerState]:
    try:
        state, _ = client.fetch()
    except OptionError as error:
        lost = Text(f"connection lost, trying again: {error}", "red")
        return Group(lost, show_frame(console, before, None, whole=False)), before
    return show_frame(console, state, before, whole=False), state
