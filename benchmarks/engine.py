"""What the engine and the HTTP server beside it cost a step, the model's own time apart.

    python -m benchmarks.engine [--quick] [--json FILE|-]

First without a model: steps of a scripted one that costs nothing. Then the embedded model, eight streams at a time:
asked from within the process, and through the server by clients of another process, at several switch intervals (how
long a thread keeps Python's lock while another waits for it: a step that comes back from a native call may wait so
long).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import uvicorn
import uvloop

from benchmarks.machine import describe_run, pin_threads, save
from benchmarks.serve_clients import Clients, Job
from dynaexq.cli.serve import listen
from dynaexq.engine import Engine, FinishEvent, Request, Sampling, StepReport
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.integrations.transformers.sampling import TransformersWarper
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.llm import LLM
from dynaexq.server.app import create_app
from dynaexq.server.limits import Limits
from dynaexq.server.metrics import Metrics
from dynaexq.server.service import Service
from dynaexq.server.state import StateView
from dynaexq.traffic.recorder import TokenRun

STREAMS = 8
INTERVALS = (0.005, 0.001, 0.0005, 0.0001)
VOCABULARY = 151_936


class NullModel:
    """See `engine.base.SlotModel`: logits that are there already."""

    slots, room, vocabulary, chunked, cuts = STREAMS, 4096, VOCABULARY, True, True

    def __init__(self) -> None:
        ranks = torch.stack([torch.randperm(VOCABULARY) for _ in range(STREAMS)])
        self._logits = -2.0 * torch.log1p(ranks.float())  # the likeliest takes 60 %, as is usual

    def window(self, prefill: bool, runs: Sequence[TokenRun]) -> contextlib.AbstractContextManager[None]:
        """Nothing."""
        return contextlib.nullcontext()

    def prefill(self, slot: int, past: int, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of one."""
        return self._logits[slot]

    def decode(self, slots: list[int], pasts: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """Logits of some."""
        return self._logits[: len(slots)]

    def copy(self, source: int, target: int, length: int) -> None:
        """Nothing."""


class Watch:
    """An observer that keeps the times of decode steps of all streams."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.rest: list[float] = []

    def on_step(self, report: StepReport) -> None:
        """Keep full steps."""
        if report.decoded_tokens == STREAMS and not report.prompt_tokens:
            self.steps.append(report.seconds)
            self.rest.append(report.seconds - report.model_seconds)

    def on_finish(self, event: FinishEvent) -> None:
        """Not looked at."""


class Both(Metrics):
    """The server's metrics, and a watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def on_step(self, report: StepReport) -> None:
        """Tell both."""
        super().on_step(report)
        self._watch.on_step(report)


def measure_overhead(steps: int) -> dict[str, Any]:
    """Milliseconds of a step at batch 8 without a model's time, by kind of sampling."""
    kinds = {
        "greedy": Sampling(),
        "temperature": Sampling(temperature=0.8),
        "temperature, top_p": Sampling(temperature=0.8, top_p=0.95),
        "temperature, top_k": Sampling(temperature=0.8, top_k=40),
    }
    result = {}
    for name, sampling in kinds.items():
        watch = Watch()
        engine = Engine(NullModel(), TransformersWarper, observer=watch)
        for _ in range(STREAMS):
            engine.submit(Request((1,) * 512, steps, lambda _: None, sampling))
        with torch.inference_mode():
            while engine.step():
                pass
        result[name] = _summary(watch.rest[5:])
    return result


def measure_beside_http(rounds: int, tokens: int) -> dict[str, Any]:
    """Milliseconds of whole steps of the embedded model, eight streams, in turns."""
    watch, before = Watch(), sys.getswitchinterval()
    metrics, clients = Both(watch), Clients()
    times: dict[str, list[float]] = {}
    with (
        LLM(str(EMBEDDED_MODEL), slots=STREAMS, context=512, mode="static", tier="int4", observer=metrics) as llm,
        _serve(llm, metrics) as port,
    ):
        job = Job(port, "demo", 4000, STREAMS, 1, (16, 16), (tokens, tokens))
        for _ in range(rounds):
            for name in ("within", *INTERVALS):
                sys.setswitchinterval(before if name == "within" else float(name))
                watch.steps.clear()
                if name == "within":
                    _ask_within(llm, tokens)
                else:
                    clients.run(job)
                times.setdefault(name if name == "within" else f"{1e3 * float(name):g} ms", []).extend(watch.steps[5:])
    sys.setswitchinterval(before)
    clients.close()
    return {name: _summary(steps) for name, steps in times.items()}


def _ask_within(llm: LLM, tokens: int) -> None:
    done = threading.Semaphore(0)

    def hear(event: Any) -> None:
        if isinstance(event, FinishEvent):
            done.release()

    for number in range(STREAMS):
        llm.engine.submit(Request(tuple(range(20 + number, 36 + number)), tokens, hear))
    for _ in range(STREAMS):
        done.acquire()


@contextmanager
def _serve(llm: LLM, metrics: Metrics) -> Iterator[int]:
    service = Service("demo", llm.engine, llm.encoder, 0)
    app = create_app(service, metrics, Limits(), StateView(service, llm.launch.runtime, metrics.pace))
    server, listener = uvicorn.Server(uvicorn.Config(app, log_level="warning")), listen("127.0.0.1", 0)

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve([listener]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()


def _summary(seconds: list[float]) -> dict[str, float]:
    median, high = np.percentile(seconds, (50, 99)).tolist()
    return {"median_ms": 1e3 * median, "p99_ms": 1e3 * high, "mean_ms": 1e3 * float(np.mean(seconds))}


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds")
    parser.add_argument("--json", metavar="FILE|-", help="save the result")
    options = parser.parse_args()
    pin_threads()
    quiet_transformers()
    overhead = measure_overhead(50 if options.quick else 300)
    beside = measure_beside_http(1 if options.quick else 5, 64 if options.quick else 200)
    save({"run": describe_run(), "overhead": overhead, "beside_http": beside}, options.json)
    if options.json != "-":
        for title, rows in (("without a model", overhead), ("embedded model", beside)):
            print(f"{title}: a step of {STREAMS} streams, ms")
            for name, row in rows.items():
                print(f"  {name}: median {row['median_ms']:.2f}, mean {row['mean_ms']:.2f}, p99 {row['p99_ms']:.2f}")


if __name__ == "__main__":
    main()
