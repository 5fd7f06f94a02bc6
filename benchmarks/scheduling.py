"""Sequences that share a cache of experts: all in every step, or those that need the same by turns.

    python -m benchmarks.scheduling [--quick] [--json FILE|-] [--readme FILE]

The embedded model answers prompts from text, mathematics and code in turn, so many at a time, from a cache of so many
of its experts over a slowed link, so that reads cost what they cost where experts are large. `timeout` 20 ms is the
default, 1 s lets groups do as they like. Loads and hits are those of steps without prompts, times between tokens those
of clients; rounds are interleaved. Then requests whose prompts begin like others, admitted in order or by what they are
expected to need. Times depend on what else the machine does; loads and hits nearly not.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import describe_run, pin_threads, publish
from benchmarks.workloads import SHIPPED
from dynaexq.engine import EngineOptions, Event, FinishEvent, Request, StepReport
from dynaexq.evaluate import read_documents
from dynaexq.formats import VersionLayout, tier_format
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import EMBEDDED_MODEL, Opened
from dynaexq.llm import LLM

FILES = ("english_heldout.txt", "gsm8k_test.jsonl", "humaneval.jsonl")
TIER, LINK_GBPS = "int4", 0.4
PROMPT, COMMON, ANSWER = 64, 48, 64
"""Tokens of a prompt; those that prompts of a file have in common where they are admitted by needs; of an answer."""

PATIENT = {"timeout_ms": 1000.0}
SETTINGS: dict[str, tuple[str, dict[str, float]]] = {
    "batch": ("batch", {}),
    "sequence": ("sequence", {}),
    "sequence, 1 s": ("sequence", PATIENT),
    "sequence, 1 s, quantum 32": ("sequence", {**PATIENT, "quantum": 32}),
    "token": ("token", {}),
    "token, 1 s": ("token", PATIENT),
}
ADMISSION = {"in order": ("batch", {}), "of 8, by needs": ("batch", {"admit_window": 8})}
QUICK = ("batch", "sequence, 1 s", "token")


class Sizes(NamedTuple):
    """What is measured."""

    modes: tuple[str, ...]
    shares: tuple[float, ...]
    streams: tuple[int, ...]
    settings: tuple[str, ...]
    requests: int
    rounds: int


FULL = Sizes(("lfu", "expertflow"), (0.3, 0.5), (4, 8, 16), tuple(SETTINGS), 24, 3)
SMALL = Sizes(("lfu",), (0.3,), (8,), QUICK, 16, 1)


class Watch:
    """An observer that adds up steps, and what the cache did in those without prompts."""

    def __init__(self) -> None:
        self.llm: LLM | None = None
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.steps = self.tokens = self.loads = self.hits = self.needs = 0
        self.seconds = 0.0
        self.scheduling = self._scheduling()
        self._seen = self._count()

    def on_step(self, report: StepReport) -> None:
        """Of all steps their time, of those without prompts the rest."""
        now = self._count()
        self.seconds += report.seconds
        if not report.prompt_tokens:
            loads, hits, needs = (after - before for after, before in zip(now, self._seen, strict=True))
            self.steps, self.tokens = self.steps + 1, self.tokens + report.decoded_tokens
            self.loads, self.hits, self.needs = self.loads + loads, self.hits + hits, self.needs + needs
        self._seen = now

    def on_finish(self, event: FinishEvent) -> None:
        """Not looked at."""

    def summarise(self) -> dict[str, float]:
        """Figures of a round."""
        return {
            "loads_per_token": self.loads / self.tokens,
            "hit_rate": self.hits / self.needs,
            "sequences_per_step": self.tokens / self.steps,
            "overhead": (self._scheduling() - self.scheduling) / self.seconds,
        }

    def _count(self) -> tuple[int, int, int]:
        cache = self.llm.launch.runtime.cache if self.llm else None
        return (cache.loads.loads, cache.map.hits, cache.map.hits + cache.map.misses) if cache else (0, 0, 0)

    def _scheduling(self) -> float:
        scheduler = self.llm.engine.scheduler if self.llm else None
        return float(scheduler.describe()["seconds"]) if scheduler else 0.0


class Client:
    """Who hears of an answer, and when."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.reused = 0
        self.done = threading.Event()

    def __call__(self, event: Event) -> None:
        """On the engine's thread."""
        if isinstance(event, FinishEvent):
            self.reused = event.reused_tokens
            self.done.set()
        else:
            self.times.append(time.perf_counter())


@contextlib.contextmanager
def load(mode: str, share: float, streams: int, granularity: str, tune: dict[str, Any], reuse: bool) -> Iterator[LLM]:
    """The model with a cache of a share of its experts, and a watch as its observer."""
    opened, watch = Opened(str(EMBEDDED_MODEL)), Watch()
    shape = opened.skeleton.profile.shape
    nbytes = VersionLayout.of(tier_format(TIER, opened.group_size), shape.expert).extent_bytes
    options = {
        "mode": mode, "tier": TIER, "expert_memory": round(share * shape.layers * shape.experts) * nbytes,
        "granularity": granularity, "tune": {"link_gbps": LINK_GBPS, **tune},
        "predictor": "average" if mode == "expertflow" else None,
    }  # fmt: skip
    engine = EngineOptions(reuse=reuse)
    with LLM(opened, slots=streams, context=PROMPT + ANSWER + 1, engine=engine, observer=watch, **options) as llm:
        watch.llm = llm
        yield llm


def ask(llm: LLM, prompts: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """Answer them all, and measure."""
    watch = llm.engine.observer
    assert isinstance(watch, Watch)
    watch.clear()
    clients, start = [Client() for _ in prompts], time.perf_counter()
    for prompt, client in zip(prompts, clients, strict=True):
        llm.engine.submit(Request(prompt, ANSWER, client))
    for client in clients:
        client.done.wait()
    seconds = time.perf_counter() - start
    gaps = 1e3 * np.concatenate([np.diff(client.times) for client in clients])
    return {
        **watch.summarise(),
        "tokens_per_second": sum(len(client.times) for client in clients) / seconds,
        "tpot_ms": float(gaps.mean()),
        "tpot_ms_p99": float(np.percentile(gaps, 99)),
        "reused_per_request": sum(client.reused for client in clients) / len(clients),
    }


def make_prompts(llm: LLM, count: int, turn: int, common: int = 0) -> list[tuple[int, ...]]:
    """So many prompts of all files in turn, others each turn; those of one file begin with `common` tokens."""
    each = -(-count // len(FILES))
    texts = ["\n\n".join(read_documents(SHIPPED / name))[: 8 * PROMPT * each * (turn + 2)] for name in FILES]
    tokens = [llm.encoder.encode(text) for text in texts]
    own = PROMPT - common
    starts = [PROMPT + own * (turn * each + place) for place in range(each)]
    found = [row[:common] + row[start : start + own] for start in starts for row in tokens]
    assert all(len(prompt) == PROMPT for prompt in found)
    return found[:count]


def compare(place: dict[str, Any], settings: dict[str, Any], requests: int, rounds: int, common: int = 0) -> list[Any]:
    """Rows of one cache and number of streams, by setting, whose rounds are interleaved."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    with contextlib.ExitStack() as stack:
        llms = {
            name: stack.enter_context(load(**place, granularity=granularity, tune=tune, reuse=common > 0))
            for name, (granularity, tune) in settings.items()
        }
        for turn in range(rounds + 1):
            for name, llm in llms.items():
                few = place["streams"] if turn == 0 else requests  # the first turn fills the cache
                found = ask(llm, make_prompts(llm, few, turn, common))
                if turn > 0:
                    runs[name].append(found)
    return [
        {**place, "setting": name, **{key: float(np.median([run[key] for run in found])) for key in found[0]}}
        for name, found in runs.items()
    ]


def render(result: dict[str, Any]) -> str:
    """The table."""
    lines = [
        "| mode | resident | streams | granularity | sequences a step | loads a token | hits | tokens/s | "
        "TPOT, mean / P99 | overhead |",
        "|---|--:|--:|---|" + "--:|" * 6,
    ]
    for row in (*result["rows"], *result["admission"]):
        lines.append(
            f"| {row['mode']} | {100 * row['share']:.0f} % | {row['streams']} | {row['setting']} | "
            f"{row['sequences_per_step']:.1f} | {row['loads_per_token']:.2f} | {100 * row['hit_rate']:.1f} % | "
            f"{row['tokens_per_second']:.0f} | {row['tpot_ms']:.0f} / {row['tpot_ms_p99']:.0f} ms | "
            f"{100 * row['overhead']:.2f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one mode and cache, few requests, one round")
    parser.add_argument("--json", metavar="FILE|-", help="write the result as JSON")
    parser.add_argument("--readme", metavar="FILE", help="replace the table between the markers of this file")
    arguments = parser.parse_args()
    pin_threads()
    quiet_transformers()
    sizes = SMALL if arguments.quick else FULL
    settings = {name: SETTINGS[name] for name in sizes.settings}
    rows = []
    for mode in sizes.modes:
        for share in sizes.shares:
            for streams in sizes.streams:
                place = {"mode": mode, "share": share, "streams": streams}
                rows += compare(place, settings, sizes.requests, sizes.rounds)
    admission = []
    for share in sizes.shares:
        place = {"mode": "lfu", "share": share, "streams": 8}
        admission += compare(place, ADMISSION, sizes.requests, sizes.rounds, common=COMMON)
    result = {"run": describe_run(), "link_gbps": LINK_GBPS, "rows": rows, "admission": admission}
    publish(result, render(result), "scheduling", arguments.json, arguments.readme)


if __name__ == "__main__":
    main()
