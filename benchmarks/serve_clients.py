"""Clients of a server, in a process of their own: `benchmarks.serve` and `benchmarks.engine` start it.

A job is a line of JSON on stdin, its measurements a line on stdout. Plain sockets, as little work as possible: the
clients share two cores with what they measure.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from typing import Any, NamedTuple


class Job(NamedTuple):
    """`clients` at a time, each asking `requests` times, prompts and answers of so many tokens (from, to)."""

    port: int
    model: str
    vocabulary: int
    clients: int
    requests: int
    prompt: tuple[int, int]
    tokens: tuple[int, int]
    seed: int = 0


class Clients:
    """The process, from outside."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "benchmarks.serve_clients"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, job: Job) -> dict[str, Any]:
        """`seconds` in all, and for each answer: seconds to the first token, between tokens, in all; tokens."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the clients ended early; see their message above")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


class _Answer(NamedTuple):
    ttft: float
    tpot: float | None
    seconds: float
    tokens: int


async def _ask(job: Job, prompt: list[int], tokens: int) -> _Answer:
    body = json.dumps({
        "model": job.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }).encode()  # fmt: skip
    lines = "POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close"
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", job.port)
    writer.write(head.encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        raise SystemExit(f"the server answers {status.decode()}{(await reader.read()).decode()}")
    times, usage = [], b""
    while line := await reader.readline():
        if line.startswith(b'data: {"') and b'"text"' in line:
            times.append(time.perf_counter())
        elif b'"completion_tokens"' in line:
            usage = line
    end = time.perf_counter()
    writer.close()
    count = int(json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"])
    between = (times[-1] - times[0]) / (count - 1) if count > 1 else None
    return _Answer(times[0] - start, between, end - start, count)


async def _run(job: Job) -> dict[str, Any]:
    async def client(number: int) -> list[_Answer]:
        chance = random.Random(1000 * job.seed + number)
        answers = []
        for _ in range(job.requests):
            prompt = [chance.randrange(10, job.vocabulary) for _ in range(chance.randint(*job.prompt))]
            answers.append(await _ask(job, prompt, chance.randint(*job.tokens)))
        return answers

    start = time.perf_counter()
    answers = await asyncio.gather(*(client(number) for number in range(job.clients)))
    return {"seconds": time.perf_counter() - start, "answers": [each for row in answers for each in row]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(asyncio.run(_run(Job(*json.loads(line))))), flush=True)
