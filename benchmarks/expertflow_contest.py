"""One row of `benchmarks.expertflow`: modes beside each other on the same prompts, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.expertflow_ground import TIER, TIERS, TURNS, Ground, copy_to_disk, measure_reads
from dynaexq.engine import EngineOptions, FinishEvent, StepReport
from dynaexq.llm import LLM
from dynaexq.policy.caching import CACHE_POLICIES, FLOW, CacheMap, Places
from dynaexq.policy.prediction import Matrix
from dynaexq.residency.cache import CachedExperts
from dynaexq.simulate.cache import BELADY, Belady
from dynaexq.simulate.trace_source import version_bytes
from dynaexq.tuning import GIGABYTE

ROUNDS, QUICK_ROUNDS = 3, 1
ROW_SECONDS = 120
"""No round begins after rounds have taken so long."""

ANSWERS, QUICK_ANSWER = {1: 64, 2: 64, 4: 64, 8: 32, 16: 16, 32: 16}, 16
"""Tokens of an answer by batch."""

FLOOR, LRU = "static", "lru"
"""All experts resident at the same tier: no mode that reads them takes less time."""

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


@dataclass
class Watch:
    """An observer that keeps steps and ends of answers."""

    steps: list[StepReport] = field(default_factory=list)
    ends: list[FinishEvent] = field(default_factory=list)

    def on_step(self, report: StepReport) -> None:
        """Keep it."""
        self.steps.append(report)

    def on_finish(self, event: FinishEvent) -> None:
        """Keep it."""
        self.ends.append(event)

    def clear(self) -> None:
        """Forget the warm-up."""
        self.steps.clear()
        self.ends.clear()


class Contestant:
    """A mode with its model; `seconds` are those of rounds."""

    def __init__(self, ground: Ground, root: Path, point: Point, plan: Plan, options: Options) -> None:
        self._ground, self._point, self._plan = ground, point, plan
        self.watch, self.seconds = Watch(), list[float]()
        context = point.prompt + plan.answer + 1
        limits = EngineOptions(reuse=False)
        self.llm = LLM(str(root), slots=point.batch, context=context, engine=limits, observer=self.watch, **options)
        self.llm.encoder.stop_tokens = frozenset()  # answers of one length
        self._before: dict[str, float] = {}

    def warm_up(self) -> None:
        """Answer the first prompts, which do not count."""
        self._answer(0)
        self.watch.clear()
        self.seconds.clear()
        self._before = read_sums(self.llm)

    def run_round(self, number: int) -> None:
        """Answer the prompts of round `number`, from 0 on."""
        self._answer(number + 1)

    def layer_seconds(self, layers: int) -> float:
        """Of a step in which all sequences go on by a token."""
        full = [step.seconds for step in self.watch.steps if step.decoded_tokens == self._point.batch]
        return statistics.median(full) / layers

    def measure(self) -> dict[str, float]:
        """What rounds came to; counts, bytes and seconds of waits are means of a round."""
        rounds, ends = len(self.seconds), self.watch.ends
        sums = read_sums(self.llm)
        found = {name: (value - self._before[name]) / rounds for name, value in sums.items()}
        seconds = statistics.median(self.seconds)
        steps = [1e3 * step.seconds for step in self.watch.steps if step.decoded_tokens]
        return {
            "seconds": seconds,
            "tokens_per_second": sum(end.generated_tokens for end in ends) / rounds / seconds,
            "ttft_ms": 1e3 * statistics.median(end.ttft_seconds or 0.0 for end in ends),
            "tpot_ms": 1e3 * statistics.fmean(end.tpot_seconds or 0.0 for end in ends),
            "tpot_p99_ms": float(np.percentile(steps, 99)),
            "wait_share": found["wait_seconds"] * rounds / sum(self.seconds),
            **found,
            **_make_shares(found),
        }

    def _answer(self, part: int) -> None:
        point, turns = self._point, TURNS[self._ground.name]
        start = time.perf_counter()
        for turn in range(turns):
            first = (part * turns + turn) * point.batch
            prompts = self._ground.take_prompts(first, point.batch, point.prompt)
            for stream in [self.llm.submit(prompt, self._plan.answer) for prompt in prompts]:
                stream.wait()
        self.seconds.append(time.perf_counter() - start)


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


def run_row(ground: Ground, point: Point, quick: bool) -> dict[str, Any]:
    """All modes at a point, beside what no cache can do better."""
    memory = round(point.cache * ground.experts) * ground.expert_bytes
    common: Options = {"tier": TIER, "expert_memory": memory}
    modes: dict[str, Options] = {name: {"mode": name, **common} for name in ((LRU,) if quick else CACHE_POLICIES)}
    for name, predictor in ground.predictors.items():
        modes[f"{FLOW} {name}"] = {"mode": FLOW, "predictor": predictor, **common}
    with _choose_root(ground, point) as root:
        return run_contest(ground, root, point, Plan.of(point.batch, quick), modes)


def run_paper_row(ground: Ground, point: Point, quick: bool) -> dict[str, Any]:
    """One limit for experts: all at the highest tier that fits, two tiers, and some experts that are read ahead."""
    memory = int(point.cache * ground.experts * ground.expert_bytes)
    low = TIERS[-1]
    assert version_bytes(ground.store, low) * ground.experts <= memory
    modes: dict[str, Options] = {
        f"static {low}": {"mode": "static", "tier": low},
        f"dynaexq {TIER}/{low}": {"mode": "dynaexq", "high": TIER, "low": low, "expert_memory": memory},
        f"{FLOW} {TIER}": {"mode": FLOW, "tier": TIER, "expert_memory": memory},
    }
    return run_contest(ground, ground.root, point, Plan.of(point.batch, quick), modes)


def run_contest(ground: Ground, root: Path, point: Point, plan: Plan, modes: dict[str, Options]) -> dict[str, Any]:
    """Warm all modes up, then let them answer the same prompts in turns; the link is as slow as the floor says."""
    reads = measure_reads(root)
    with ExitStack() as stack:

        def enter(options: Options) -> Contestant:
            contestant = Contestant(ground, root, point, plan, options)
            stack.callback(contestant.llm.close)
            return contestant

        found = {FLOOR: enter({"mode": "static", "tier": TIER})}
        found[FLOOR].run_round(-1)
        layer = found[FLOOR].layer_seconds(ground.store.shape.layers)
        link = None if point.link is None else ground.expert_bytes / (point.link * layer) / GIGABYTE
        for name, options in modes.items():
            tune = {} if link is None or options["mode"] == "static" else {"tune": {"link_gbps": link}}
            found[name] = enter({**options, **tune})
        cache = found[LRU].llm.launch.runtime.cache if LRU in found else None
        needs = Needs(cache) if cache else None
        rounds = _take_turns(list(found.values()), plan.rounds, needs)
        return {
            "point": point._asdict(),
            "answer": plan.answer,
            "turns": TURNS[ground.name],
            "rounds": rounds,
            "layer_ms": 1e3 * layer,
            "link_gbps": link,
            "read_gbps": reads / GIGABYTE,
            "expert_bytes": ground.expert_bytes,
            "modes": {name: each.measure() for name, each in found.items()},
            **({BELADY: needs.measure_belady(ground.experts, cache.map.capacity)} if needs and cache else {}),
        }


def _take_turns(contestants: Sequence[Contestant], rounds: int, needs: Needs | None) -> int:
    """Returns how many rounds there were."""
    for each in contestants:
        each.warm_up()
    start, done = time.monotonic(), 0
    while done < rounds and time.monotonic() - start < ROW_SECONDS:
        if needs:
            needs.mark()
        first = done % len(contestants)
        for each in (*contestants[first:], *contestants[:first]):
            each.run_round(done)
        done += 1
    if needs:
        needs.mark()
    return done


@contextmanager
def _choose_root(ground: Ground, point: Point) -> Iterator[Path]:
    if point.link is not None:
        yield ground.root
        return
    with copy_to_disk(ground) as root:
        yield root


class Needs:
    """What layers ask a cache for, in their order, and where rounds begin: listened to while it works."""

    def __init__(self, cache: CachedExperts) -> None:
        self._look, self._experts = cache.look, cache.shape.experts
        self._all: list[tuple[int, Places]] = []
        self._marks: list[int] = []
        cache.look = self._listen  # type: ignore[method-assign]

    def mark(self) -> None:
        """A round begins, or the last one has ended."""
        self._marks.append(len(self._all))

    def measure_belady(self, size: int, capacity: int) -> dict[str, float]:
        """Hits and misses of a round, on average, of a cache that knows the future."""
        needs = [(self._experts * layer + np.unique(ids), when) for when, (layer, ids) in enumerate(self._all)]
        cache, counts = CacheMap(size, capacity, Belady(size, needs)), []
        for places, when in needs:
            if when in self._marks:
                counts.append((cache.hits, cache.misses))
            for group in cache.split(places):
                missing, _ = cache.need(group)
                cache.admit(missing)
        rounds = len(self._marks) - 1
        hits, misses = cache.hits - counts[0][0], cache.misses - counts[0][1]
        return {"hit_rate": hits / (hits + misses), "hits": hits / rounds, "misses": misses / rounds}

    def _listen(self, layer: int, ids: Places, hidden: Matrix | None) -> list[Places]:
        self._all.append((layer, ids.copy()))
        return self._look(layer, ids, hidden)
