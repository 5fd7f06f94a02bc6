"""`dynaexq serve` as a process: starts, refuses to start, drains, and is told to go."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from dynaexq.cli.serve import check_exposure, check_names, listen
from dynaexq.core import OptionError
from support.serving import request

ASK: Any = {"model": "demo", "prompt": "The ", "temperature": 1.0, "stream": True}


class Served:
    """A server process that listens."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port
        self.rest = ""
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.rest = self.process.stderr.read()


@contextmanager
def served(cache: Path, *options: str) -> Iterator[Served]:
    command = [sys.executable, "-m", "dynaexq", "serve", "--demo", "--port", "0", *options]
    environment = {**os.environ, "DYNAEXQ_CACHE": str(cache)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)/v1", line):
            break
    else:
        raise AssertionError("".join(seen))
    try:
        yield Served(process, int(found[1]))
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def refuse(*options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "dynaexq", "serve", "--demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stderr


def test_answers_end_before_the_server_goes(cache: Path) -> None:
    with served(cache, "--mode", "static", "--tier", "int4", "--slots", "2") as server:
        streams = [server.client.completions.create(max_tokens=60, seed=seed, **ASK) for seed in range(3)]
        firsts = [next(iter(stream)) for stream in streams[:2]]
        assert all(first.choices for first in firsts)
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:  # one of them still waits for a slot
            reasons = [chunk.choices[0].finish_reason for chunk in stream]
            assert reasons[-1] in ("length", "stop")
        assert server.process.wait(60) == 0


def test_a_second_server_shares_the_store_and_a_killed_one_harms_nothing(cache: Path) -> None:
    with served(cache) as first, served(cache, "--name", "other", "--drain", "0.2") as second:
        for server in (first, second):
            assert request(server.port, "GET", "/ready").status == 200
        first.process.kill()
        assert second.client.completions.create(model="other", prompt="The ", max_tokens=4).choices
        endless: Any = {**ASK, "model": "other", "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
        stream = second.client.completions.create(**endless)
        next(iter(stream))
        second.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in stream:
                pass
        assert second.process.wait(60) == 0
        second.reader.join(60)
        assert "Traceback" not in second.rest and "ERROR" not in second.rest


def test_what_stops_the_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        code, text = refuse("--port", str(taken.getsockname()[1]))
    assert code == 2 and text.startswith("error: cannot listen on 127.0.0.1 port")


@pytest.mark.parametrize(
    ("host", "key", "without", "message"),
    [
        ("0.0.0.0", None, False, "can be reached from other machines"),
        ("::", None, False, "can be reached from other machines"),
        ("example.org", None, False, "can be reached from other machines"),
        ("127.0.0.1", None, True, "--no-api-key does nothing on 127.0.0.1"),
        ("127.0.0.1", " ", False, "the API key is empty"),
        ("0.0.0.0", "k", True, "leave one out"),
    ],
)
def test_nobody_is_let_in_by_accident(host: str, key: str | None, without: bool, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_exposure(host, key, without)


@pytest.mark.parametrize("name", ["", " ", "a\x1b[31mb", "a\nb"])
def test_names_that_nobody_can_type(name: str) -> None:
    with pytest.raises(OptionError, match="--name"):
        check_names(name, [])


def test_origins() -> None:
    check_names(None, ["https://a.b", "http://localhost:3000", "*"])
    for origin in ("a.b", "https://a.b/", "ftp://a", "https://a b"):
        with pytest.raises(OptionError, match="--cors"):
            check_names(None, [origin])


def test_addresses_that_are_fine() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_exposure(host, None, False)
        check_exposure(host, "k", False)
    check_exposure("0.0.0.0", "k", False)
    check_exposure("0.0.0.0", None, True)
    with pytest.raises(OptionError, match="cannot listen on no.such.host.invalid"):
        listen("no.such.host.invalid", 0)
