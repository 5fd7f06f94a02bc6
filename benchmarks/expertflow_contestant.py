"""A mode with its model, as `benchmarks.expertflow` runs it: answers prompts, and says what they came to."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.expertflow_ground import TURNS, Ground
from dynaexq.engine import EngineOptions, FinishEvent, StepReport
from dynaexq.llm import LLM

ROUNDS, QUICK_ROUNDS = 3, 1
ANSWERS, QUICK_ANSWER = {1: 64, 2: 64, 4: 64, 8: 32, 16: 16, 32: 16}, 16
"""Tokens of an answer by batch."""

WARM_UP = 8
"""Prompts at a time that fill a cache, and let what reads ahead find its horizon: batches of more take minutes."""

STEP_TOKENS = 512
"""Of a step at most: as many prompts begin at once that all sequences of a batch then go on together."""

Options = dict[str, Any]


class Point(NamedTuple):
    """What a row is of. `link`: layer times that a load takes, None: as the disk reads; `cache`: share of experts."""

    model: str
    link: float | None = 1.0
    cache: float = 0.3
    batch: int = 1
    prompt: int = 64

    @property
    def key(self) -> str:
        """Its name."""
        link = "disk" if self.link is None else f"{self.link:g}"
        return f"{self.model}, link {link}, cache {self.cache:g}, batch {self.batch}, prompt {self.prompt}"


class Plan(NamedTuple):
    """How long rows take: rounds, and tokens of an answer."""

    rounds: int
    answer: int

    @classmethod
    def of(cls, batch: int, quick: bool) -> Plan:
        """For a batch."""
        return cls(QUICK_ROUNDS, QUICK_ANSWER) if quick else cls(ROUNDS, ANSWERS[batch])


class Watch:
    """An observer that keeps steps."""

    def __init__(self) -> None:
        self.steps: list[StepReport] = []

    def on_step(self, report: StepReport) -> None:
        """Keep it."""
        self.steps.append(report)

    def on_finish(self, event: FinishEvent) -> None:
        """Not looked at: answers say it."""


class Contestant:
    """A mode with its model."""

    def __init__(self, ground: Ground, root: Path, point: Point, plan: Plan, options: Options) -> None:
        self._ground, self._point, self._plan = ground, point, plan
        self._watch = Watch()
        self._seconds, self._ends = list[float](), list[FinishEvent]()
        context = point.prompt + plan.answer + 1
        limits = EngineOptions(step_tokens=STEP_TOKENS, reuse=False)
        self.llm = LLM(str(root), slots=point.batch, context=context, engine=limits, observer=self._watch, **options)
        self.llm.encoder.stop_tokens = frozenset()  # answers of one length
        self._before: dict[str, float] = {}

    def warm_up(self) -> None:
        """Answer the first prompts, WARM_UP of them at a time at most, which do not count."""
        self._answer(0, WARM_UP)
        self._watch.steps.clear()
        self._seconds.clear()
        self._ends.clear()
        self._before = read_sums(self.llm)

    def run_round(self, number: int) -> None:
        """Answer the prompts of round `number`, from 0 on."""
        self._answer(number + 1)

    def layer_seconds(self, layers: int) -> float:
        """Of a step in which all sequences go on by a token."""
        full = [step.seconds for step in self._watch.steps if step.decoded_tokens == self._point.batch]
        return statistics.median(full) / layers

    def measure(self) -> dict[str, float]:
        """What rounds came to; counts, bytes and seconds of waits are means of a round."""
        rounds, ends = len(self._seconds), self._ends
        sums = read_sums(self.llm)
        found = {name: (value - self._before[name]) / rounds for name, value in sums.items()}
        seconds = statistics.median(self._seconds)
        steps = [1e3 * step.seconds for step in self._watch.steps if step.decoded_tokens]
        return {
            "seconds": seconds,
            "tokens_per_second": sum(end.generated_tokens for end in ends) / rounds / seconds,
            "ttft_ms": 1e3 * statistics.median(end.ttft_seconds or 0.0 for end in ends),
            "tpot_ms": 1e3 * statistics.fmean(end.tpot_seconds or 0.0 for end in ends),
            "tpot_p99_ms": float(np.percentile(steps, 99)),
            "wait_share": found["wait_seconds"] * rounds / sum(self._seconds),
            **found,
            **_make_shares(found),
        }

    def _answer(self, part: int, most: int | None = None) -> None:
        point, turns = self._point, TURNS[self._ground.name]
        start = time.perf_counter()
        for turn in range(turns):
            first = (part * turns + turn) * point.batch
            prompts = self._ground.take_prompts(first, min(point.batch, most or point.batch), point.prompt)
            streams = [self.llm.submit(prompt, self._plan.answer) for prompt in prompts]
            self._ends += [stream.wait().finish for stream in streams]
        self._seconds.append(time.perf_counter() - start)


def read_sums(llm: LLM) -> dict[str, float]:
    """What the engine has counted so far: waits and bytes, and what became of reads and predictions."""
    runtime = llm.launch.runtime
    counters, cache = runtime.counters, runtime.describe_cache() or {}
    names = ("hits", "misses", "late", "useful", "wasted", "loads", "loads_ahead", "load_seconds", "cancelled")
    sums = {name: float(cache.get(name, 0)) for name in (*names, "predicted", "predicted_right")}
    moves = counters.promotions + counters.demotions
    return {
        "waits": counters.waits,
        "wait_seconds": counters.wait_seconds,
        "bytes_moved": counters.bytes_moved,
        "moves": moves,
        **sums,
    }


def _make_shares(sums: dict[str, float]) -> dict[str, float]:
    """Hits, hidden time, recall and precision, as far as there were any."""
    needed = sums["hits"] + sums["misses"]
    pairs = {
        "hit_rate": (sums["hits"], needed),
        "hidden": (max(0.0, sums["load_seconds"] - sums["wait_seconds"]), sums["load_seconds"]),
        "recall": (sums["predicted_right"], needed if sums["predicted"] else 0.0),
        "precision": (sums["predicted_right"], sums["predicted"]),
    }
    return {name: part / whole for name, (part, whole) in pairs.items() if whole}
