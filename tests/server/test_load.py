"""Many clients at once, arriving and asking as real ones did, some of whom leave: nothing leaks, nothing is mixed up.

`make soak` runs it for ten minutes, the suite for seconds.
"""

from __future__ import annotations

import asyncio
import csv
import gc
import os
import random
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import openai
import pytest

from dynaexq.engine import EngineOptions
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.llm import LLM
from dynaexq.plan.process import resident_bytes
from dynaexq.server.metrics import Metrics
from support.serving import serve_app, wait_for

SECONDS = float(os.environ.get("DYNAEXQ_SOAK_SECONDS", "5"))
STREAMS = 64
TRACE = Path(__file__).parents[2] / "data" / "azure_conv_2023.csv"
SHRINK = 8
"""The trace's prompts and answers are this much longer than the embedded model's context allows."""

LEAK_BYTES = 64 << 20
WORDS = ["coins", "boxes", "the", "There", "are", "7", "4", "in", "each", "reverse", "copy", "a", "b", "c"]


class Call(NamedTuple):
    """One request of a trace: seconds after the first, prompt words, answer tokens."""

    at: float
    words: int
    tokens: int


def read_trace() -> list[Call]:
    with TRACE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    return [
        Call(
            time - times[0],
            1 + int(row["ContextTokens"]) // SHRINK % 200,
            1 + int(row["GeneratedTokens"]) // SHRINK % 60,
        )
        for time, row in zip(times, rows, strict=True)
    ]


class Load:
    """Clients of one server."""

    def __init__(self, port: int, seed: int) -> None:
        self.client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        self.random = random.Random(seed)
        self.answers: dict[str, tuple[int, str]] = {}
        self.left = self.done = 0

    async def run(self, seconds: float) -> None:
        """Keep up to STREAMS requests going for `seconds`, at the trace's gaps (sped up to fill them)."""
        gate, end = asyncio.Semaphore(STREAMS), asyncio.get_running_loop().time() + seconds
        running: set[asyncio.Task[None]] = set()
        calls, previous = read_trace(), 0.0
        number = 0
        while asyncio.get_running_loop().time() < end:
            call = calls[number % len(calls)]
            await asyncio.sleep(max(0.0, call.at - previous) / 40)
            previous = call.at
            await gate.acquire()
            task = asyncio.create_task(self._ask(number, call))
            running.add(task)
            task.add_done_callback(lambda done: (running.discard(done), gate.release()))
            number += 1
        await asyncio.gather(*running)
        await self.client.close()

    async def _ask(self, number: int, call: Call) -> None:
        prompt = f"{number} " + " ".join(self.random.choice(WORDS) for _ in range(call.words))
        leaves = self.random.random() < 0.2
        stream = await self.client.completions.create(
            model="demo", prompt=prompt, max_tokens=call.tokens, temperature=0, stream=True
        )
        text, pieces, patience = "", 0, self.random.randint(0, 10)
        async for chunk in stream:
            if leaves and pieces == patience:
                await stream.close()
                self.left += 1
                return
            text += chunk.choices[0].text
            pieces += 1
        self.done += 1
        if self.random.random() < 0.3 and len(self.answers) < 100:
            self.answers[prompt] = (call.tokens, text)


# What a client's library leaves open when it leaves a stream is collected in any thread, the server's too.
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mode", ["static", "dynaexq"])
def test_a_crowd(mode: str) -> None:
    options = {"mode": "static", "tier": "int4"} if mode == "static" else {"mode": mode, "expert_memory": "12M"}
    metrics = Metrics()
    limits = EngineOptions(reuse=False)
    with LLM(str(EMBEDDED_MODEL), slots=16, context=512, engine=limits, observer=metrics, **options) as llm:
        runtime, engine = llm.launch.runtime, llm.engine
        with serve_app(llm, metrics) as port:
            warm, load = Load(port, 1), Load(port, 2)
            asyncio.run(warm.run(SECONDS / 8))
            gc.collect()
            before = resident_bytes()
            asyncio.run(load.run(SECONDS / 2))
            wait_for(lambda: engine.counts().unfinished == 0)
            gc.collect()
            assert resident_bytes() - before < LEAK_BYTES
        counts = engine.counts()
        assert load.left > 0 and load.done > 0 and counts.finished["failed"] == 0
        assert (counts.running, counts.waiting, counts.slots_free) == (0, 0, 16)
        assert runtime.counters.waits == 0
        if mode == "static":
            for prompt, (tokens, text) in load.answers.items():
                assert llm.generate(prompt, max_tokens=tokens).text == text
        else:
            assert runtime.counters.promotions > 0
    runtime.experts.check_integrity()
