"""One row of `benchmarks.expertflow`: modes beside each other on the same prompts, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.expertflow_bound import DEFAULT, FLOOR, LRU
from benchmarks.expertflow_contestant import Contestant, Options, Plan, Point
from benchmarks.expertflow_ground import TIER, TIERS, TURNS, Ground, copy_to_disk, measure_reads
from dynaexq.policy.caching import CACHE_POLICIES, FLOW, CacheMap, Places
from dynaexq.policy.prediction import Matrix
from dynaexq.residency.cache import CachedExperts
from dynaexq.simulate.cache import BELADY, Belady
from dynaexq.simulate.trace_source import version_bytes
from dynaexq.tuning import GIGABYTE

ROW_SECONDS = 120
"""No round begins after rounds have taken so long."""

WHERE_ALL_FIT = (LRU, DEFAULT)
"""Modes that read nothing any more are alike, and each takes the memory of all experts."""


def run_row(ground: Ground, point: Point, quick: bool) -> dict[str, Any]:
    """All modes at a point, beside what no cache can do better."""
    memory = round(point.cache * ground.experts) * ground.expert_bytes
    common: Options = {"tier": TIER, "expert_memory": memory}
    modes: dict[str, Options] = {name: {"mode": name, **common} for name in ((LRU,) if quick else CACHE_POLICIES)}
    for name, predictor in ground.predictors.items():
        modes[f"{FLOW} {name}"] = {"mode": FLOW, "predictor": predictor, **common}
    if point.cache == 1:
        modes = {name: modes[name] for name in WHERE_ALL_FIT}
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
