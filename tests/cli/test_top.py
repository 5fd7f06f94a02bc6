"""`dynaexq top` over servers that are made up."""

from __future__ import annotations

import itertools
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from typer.testing import CliRunner

from dynaexq.cli import top_client
from dynaexq.cli.app import app
from dynaexq.cli.top_state import ServerState
from dynaexq.cli.top_view import show_map
from support.state_server import Reply, make_state, reply_state, serve_states

KEY = "a key"


def run(*arguments: str, code: int = 0, **env: str) -> Any:
    result = CliRunner().invoke(app, ["top", *arguments], env={"COLUMNS": "140", "DYNAEXQ_API_KEY": None, **env})
    assert result.exit_code == code, (result.output, result.exception)
    return result


def refuse(*arguments: str, words: str, **env: str) -> None:
    result = run(*arguments, code=2, **env)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and words in line, line


def show_once(**changes: Any) -> str:
    with serve_states(lambda *_: reply_state(make_state(**changes))) as server:
        output: str = run(server.url, "--once").stdout
        return output


def test_once_shows_everything() -> None:
    text = show_once(problems=["1 version could not be read"], paused=True)
    for words in (
        "demo  dynaexq, paused  ready  up 1 h 6 min",
        "1 version could not be read",
        "612.0 MiB of 700.0 MiB",
        "dense weights 200.0 MiB",
        "experts hold 9.0 MiB of 12.0 MiB",
        "# int8 (8.25 bits): 64 experts, 5.0 MiB",
        "83.0 % of routed traffic above int4",
        "1,000 promotions, 900 demotions",
        "2 in flight, 1 waiting for reclaim",
        "74.2 tokens/s",
        "TTFT p50 132.0 ms p99 840.0 ms; TPOT p50 13.1 ms p99 21.0 ms",
        "2 running in 4 slots of 4,096 tokens, 3 waiting",
        "64 of 100, 1.2 s",
        "32 of 64, 2.5 s",
    ):
        assert words in text, words
    lines = text.splitlines()
    row = "".join("#" if (3 + expert) % 3 == 1 else "." for expert in range(32))
    assert f"    3  {row[:17]}+{row[18:]}  90 %" in lines
    assert any(line.startswith("    2  ") and line[7 + 4] == "o" for line in lines)  # pinned


def test_a_model_that_does_not_move() -> None:
    one: dict[str, Any] = {"tiers": [{"name": "int4", "bits": 4.5, "experts": 192, "bytes": 1}], "map": ["0" * 32] * 6}
    text = show_once(mode="static", slots=[], hotness=None, moving=[], pinned=[], hot_share_high_by_layer=None, **one)
    assert "no expert changes its tier in mode static" in text and "routed traffic" not in text
    assert f"    5  {'#' * 32}\n" in text


def test_a_cache_shows_what_it_meets() -> None:
    tiers = [
        {"name": "int4", "bits": 4.5, "experts": 50, "bytes": 1},
        {"name": "not loaded", "bits": 0, "experts": 142, "bytes": 0},
    ]
    cache = {"capacity": 50, "hits": 300, "misses": 100, "hit_rate": 0.75}
    still: dict[str, Any] = {"slots": [], "hotness": None, "moving": [], "pinned": [], "hot_share_high_by_layer": None}
    text = show_once(mode="lfu", tiers=tiers, map=["01" * 16] * 6, cache=cache, **still)
    assert "75.0 % of 400 needs were met by 50 experts" in text and "routed traffic" not in text
    assert "layers waited" in text and "no expert changes" not in text and "hidden" not in text
    cache |= {"hidden": 0.9, "recall": 0.8, "horizon": 2}
    text = show_once(mode="expertflow", tiers=tiers, map=["01" * 16] * 6, cache=cache, **still)
    assert "90.0 % of reading hidden, 80.0 % of needs predicted, 2 layers ahead" in text


def test_a_map_that_does_not_fit_shows_shares_of_blocks() -> None:
    state = ServerState.model_validate(make_state(94, 512))
    lines = [line.plain for line in show_map(state, columns=64, rows=24)]
    assert lines[0].startswith("layer  tenths at the highest tier, of 4 x 8 experts")
    assert len(lines) == 1 + 24 and lines[1] == f"    0  {'3' * 64}  70 %"  # a third of all are high
    assert lines[-1].startswith("   92  ")


def test_json_is_what_the_server_sent() -> None:
    state = make_state(polls=3)
    with serve_states(lambda *_: reply_state(state)) as server:
        assert json.loads(run(f"{server.url}/v1/", "--json").stdout) == state
        assert server.paths == {"/state"}


def test_a_key_is_sent() -> None:
    def answer(path: str, key: str | None) -> Reply:
        return reply_state(make_state()) if key == KEY else Reply("{}", status=401)

    with serve_states(answer) as server:
        run(server.url, "--once", "--api-key", KEY)
        run(server.url, "--once", DYNAEXQ_API_KEY=KEY)
        refuse(server.url, "--once", words=f"{server.url} wants a key; give --api-key or set DYNAEXQ_API_KEY")
        refuse(server.url, "--json", "--api-key", "no", words=f"{server.url} does not take this key")
        refuse(server.url, "--json", "--api-key", " ", words="the API key is empty or cannot be sent")


def test_what_the_server_says_is_no_markup_and_moves_no_cursor() -> None:
    text = show_once(model="[red]x[/red][/]\x1b[2J\x07\u202e", problems=["[link=http://x]\r\nhere"], mode="\x9b2J")
    assert "[red]x[/red][/]?[2J??" in text and "[link=http://x]??here" in text and "?2J" in text
    assert not set(text) & set("\x1b\x07\r\x9b\u202e")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--once", "--json"], "--once and --json are given"),
        (["--json", "--interval", "2"], "--interval does nothing with --json"),
        (["--once", "--interval", "2"], "--interval does nothing with --once"),
        (["127.0.0.1:8000", "--once"], "'127.0.0.1:8000' is not a server's address; give it as http://HOST:PORT"),
        (["http://127.0.0.1:port", "--once"], "is not a server's address"),
        (["file:///etc/passwd", "--once"], "is not a server's address"),
        (["http://host:1/\n", "--once"], "is not a server's address"),
        ([], "the output is not a terminal; give --once or --json"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], words: str) -> None:
    refuse(*arguments, words=words)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply("Not found", "text/plain", 404), "/state answers 404"),
        (Reply("moved", "text/plain", 302), "/state answers 302"),
        (Reply("<html>", "text/html"), "/state is not JSON"),
        (Reply(b"\xff\xfe"), "/state is not JSON"),
        (Reply('{"uptime_seconds": NaN}'), "/state is not JSON"),
        (Reply("[" * 100_000), "/state is not JSON"),
        (Reply("[]"), "Input should be"),
        (Reply('{"model": "demo"}'), "version: Field required"),
        (reply_state(make_state(map=["012"])), "the map has tiers that are not listed"),
        (reply_state(make_state(map=["01", "0"])), "layers of several sizes"),
        (reply_state(make_state(map=[])), "the map has no experts"),
        (reply_state(make_state(hot_share_high_by_layer=[1.0])), "traffic is not given for every layer"),
        (reply_state(make_state(memory={"limit": 1, "used": 1, "parts": {"\x1b[2J": "x"}})), "parts.?[2J"),
    ],
)
def test_another_kind_of_server(reply: Reply, words: str) -> None:
    with serve_states(lambda *_: reply) as server:
        refuse(server.url, "--once", words=words)
        refuse(server.url, "--json", words=f"{server.url} is not a DynaExq server of this version")


def test_nothing_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        refuse(url, "--once", words=f"nothing listens at {url}; start `dynaexq serve`, or give the address it printed")


def test_a_server_that_is_silent_or_speaks_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(top_client, "TIMEOUT_SECONDS", 0.1)
        refuse(url, "--once", words=f"{url} does not answer within 0.1 s")
        server.accept()[0].close()
        monkeypatch.undo()

        def greet() -> None:
            with server.accept()[0] as client:
                client.recv(1000)
                client.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        greeter = threading.Thread(target=greet, daemon=True)
        greeter.start()
        refuse(url, "--once", words="it does not speak HTTP")
        greeter.join(30)


def read_until(terminal: int, words: bytes) -> bytes:
    """What the terminal shows, up to `words`, which have to come; b"": all that comes."""
    seen = b""
    while not words or words not in seen:
        assert select.select([terminal], [], [], 60)[0], seen[-2000:]
        try:
            seen += os.read(terminal, 1024)
        except OSError:  # the other side is closed
            assert not words, seen[-2000:]
            break
    return seen


def test_live_until_interrupted() -> None:
    """In a terminal: rates come from one look to the next, a server may go away for a while, Ctrl-C is no error."""
    polls = itertools.count()

    def answer(*_: Any) -> Reply:
        number = next(polls)
        return Reply("{}", status=503) if number == 3 else reply_state(make_state(polls=number))

    ours, theirs = pty.openpty()
    with serve_states(answer) as server:
        # a suite started in the background of a shell ignores SIGINT, and so would its children
        command = [
            "env",
            "--default-signal=INT",
            sys.executable,
            "-m",
            "dynaexq",
            "top",
            server.url,
            "--interval",
            "0.1",
        ]
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=env) as process:
            os.close(theirs)
            try:
                read_until(ours, b"(7.0/s)")
                read_until(ours, b"connection lost, trying again")
                read_until(ours, b"(7.0/s)")
                process.send_signal(signal.SIGINT)
                rest = read_until(ours, b"")
                assert process.wait(60) == 0 and process.stderr is not None and process.stderr.read() == b""
            finally:
                process.kill()
    os.close(ours)
    assert rest.rindex(b"\x1b[?25h") > rest.rfind(b"\x1b[?25l")  # the cursor is back
    assert b"\x1b[?1049l" in rest  # and the screen
