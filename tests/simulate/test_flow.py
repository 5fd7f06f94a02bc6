"""Mode `expertflow` in virtual time: what is read ahead is there in time, and never instead of what is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaexq.core import ExpertShape, ModelShape, OptionError
from dynaexq.device.virtual import VirtualClock, VirtualLink
from dynaexq.formats import VersionLayout
from dynaexq.llm import LLM
from dynaexq.policy.caching import CacheMap, Places
from dynaexq.policy.foresight import Foresight, ForesightOptions, make_flow_mind
from dynaexq.policy.horizon import lead_steps
from dynaexq.policy.prediction import Counts, MovingAverage, Predictor, Routers
from dynaexq.simulate.costs import Line, StepCosts
from dynaexq.simulate.feed import Asked
from dynaexq.simulate.flow import SimulatedFlow
from dynaexq.simulate.options import SimulationOptions
from dynaexq.simulate.oracle import Oracle
from dynaexq.simulate.report import SimulationReport, simulate
from dynaexq.simulate.trace_source import TracedModel, open_source
from dynaexq.store import ExpertStore
from dynaexq.traffic.trace import TraceHead, TraceReader, TraceRows
from dynaexq.traffic.trace_writer import TraceWriter
from simulate.test_run import HEAD, MIB, SOURCE, Rows, make_rows

NBYTES, LOAD, LAYER = 100, 0.05, 0.02
COSTS = StepCosts(decode=Line(start=0.004), prefill=Line(start=0.01))
FLOW = SimulationOptions("expertflow", tier="int4", expert_memory=MIB, link=1e8)
Needs = list[list[list[int]]]
"""Of every pass, the experts that each layer needs."""


class Noted(VirtualLink):
    """Remembers what began to be read, and when."""

    def __init__(self, clock: VirtualClock, speed: float, latency: float = 0.0) -> None:
        super().__init__(clock, speed, latency)
        self.begun: list[tuple[int, float]] = []

    def submit(self, ticket: int, nbytes: int, copy: Callable[[], None]) -> None:
        self.begun.append((ticket, round(self._clock.now, 6)))
        super().submit(ticket, nbytes, copy)


class Checked(SimulatedFlow):
    """Looks at everything after every layer."""

    def _bring(self, layer: int, places: Places) -> None:
        super()._bring(layer, places)
        assert self.map.resident[places].all()
        assert self.map.check_integrity() <= self.map.capacity
        assert len(self._ahead) <= self._in_flight and self.map.loading[list(self._ahead)].all()


class Fixed:
    """A predictor that says the same, whatever happens."""

    watches = False

    def __init__(self, likely: Sequence[float]) -> None:
        self.likely = np.array(likely, np.float64)
        self.usual = self.likely.copy()

    def note(self, layer: int, counts: Counts, hidden: object) -> None:
        """Nothing is learnt."""

    def forget(self) -> None:
        """Nothing is known."""


def masks(needs: Needs, experts: int) -> list[Any]:
    return [np.concatenate([np.isin(np.arange(experts), each) for each in layers]) for layers in needs]


def make_flow(
    shape: ModelShape,
    capacity: int,
    predictor: Callable[[], Predictor],
    options: ForesightOptions,
    in_flight: int = 4,
    load: float = LOAD,
) -> tuple[Checked, Noted]:
    clock = VirtualClock()
    link = Noted(clock, NBYTES / load)
    mind = make_flow_mind(predictor, shape, capacity, options)
    return Checked(shape, mind, NBYTES, clock, link, in_flight), link


def run(flow: SimulatedFlow, needs: Needs, experts: int, layer: float = LAYER) -> list[float]:
    """Seconds that each pass waited."""
    now, waits = 0.0, []
    for mask in masks(needs, experts):
        before = flow.counters.wait_seconds
        end = flow.run(Asked(mask.astype(np.int64), 1), now, layer * len(needs[0]))
        waits.append(flow.counters.wait_seconds - before)
        assert waits[-1] >= 0 and end - now == pytest.approx(layer * len(needs[0]) + waits[-1])
        now = end
    return waits


def test_the_example_of_the_specification() -> None:
    """50 ms a load at 20 ms a step are 3 steps of lead: 8 hide all, where bandwidth suffices, and 1 does not."""
    assert lead_steps(LOAD, LAYER) == 3
    shape = ModelShape(12, 16, ExpertShape(64, 32))
    needs = [[[number % 16 if layer % 3 == 0 else 0] for layer in range(12)] for number in range(40)]
    waits = {}
    for lookahead in (1, 8):
        oracle = partial(Oracle, shape, 1.0, masks(needs, 16))
        flow, _ = make_flow(shape, 20, oracle, ForesightOptions(lookahead))
        waits[lookahead] = run(flow, needs, 16)
        figures = flow.describe()
        assert figures["recall"] == figures["precision"] == 1 and figures["horizon"] == lookahead
    assert sum(waits[8][4:]) == 0 and figures["hidden"] > 0.9 and figures["wasted"] == 0
    assert min(waits[1][4:]) == pytest.approx(4 * (LOAD - LAYER))


def test_a_horizon_that_finds_itself_waits_less_than_one_layer_ahead() -> None:
    shape = ModelShape(12, 16, ExpertShape(64, 32))
    needs = [[[number % 16 if layer % 3 == 0 else 0] for layer in range(12)] for number in range(110)]
    oracle = partial(Oracle, shape, 1.0, masks(needs, 16))
    flow, _ = make_flow(shape, 20, oracle, ForesightOptions(None))
    waits = run(flow, needs, 16)
    assert 1 < flow.describe()["horizon"] <= 12 and sum(waits[-20:]) < 0.1 * 20 * 4 * (LOAD - LAYER)


def test_what_is_needed_comes_before_what_is_foreseen_and_what_began_is_not_stopped() -> None:
    shape = ModelShape(2, 8, ExpertShape(64, 32))
    likely = [0.0] * 8 + [0.9, 0.8, 0.7, 0.6, 0.0, 0.0, 0.0, 0.0]
    flow, link = make_flow(shape, 8, lambda: Fixed(likely), ForesightOptions(1), in_flight=1)
    counts = np.zeros(16, np.int64)
    counts[[0, 1, 8 + 5]] = 1
    end = flow.run(Asked(counts, 1), 0.0, 2 * LAYER)
    assert link.begun == [(0, 0.0), (1, 0.0), (8, 0.0), (8 + 5, 0.12)]
    assert end == pytest.approx(3 * LOAD + LOAD + LAYER)  # the wrong one ends before the right one begins
    assert flow.describe()["cancelled"] == 3 and flow.counters.waits == 2
    assert flow.counters.wait_seconds == pytest.approx(0.1 + 0.08)


def test_who_comes_late_is_waited_for_and_not_read_twice() -> None:
    shape = ModelShape(2, 4, ExpertShape(64, 32))
    flow, link = make_flow(shape, 4, lambda: Fixed([0.0] * 4 + [0.0, 0.9, 0.0, 0.0]), ForesightOptions(1))
    counts = np.zeros(8, np.int64)
    counts[[0, 5]] = 1
    flow.run(Asked(counts, 1), 0.0, 2 * LAYER)
    figures = flow.describe()
    assert [ticket for ticket, _ in link.begun] == [0, 5] and figures["loads"] == 2 and figures["loads_ahead"] == 1
    assert (figures["hits"], figures["misses"], figures["late"], figures["useful"]) == (0, 2, 1, 1)
    assert flow.counters.wait_seconds == pytest.approx(0.05 + 0.03) and figures["hidden"] == pytest.approx(0.2)


def test_time_between_passes_is_read_in() -> None:
    shape = ModelShape(2, 4, ExpertShape(64, 32))
    flow, _ = make_flow(shape, 8, lambda: Fixed([0.0, 0.9, 0.0, 0.0] * 2), ForesightOptions(2))
    counts = np.tile([1, 0, 0, 0], 2)
    end = flow.run(Asked(counts, 1), 0.0, 2 * LAYER)
    waited = flow.counters.wait_seconds
    assert flow.run(Asked(counts[::-1].copy(), 1), end + 1.0, 2 * LAYER) == pytest.approx(
        end + 1 + 2 * LOAD + 2 * LAYER
    )
    assert flow.counters.wait_seconds - waited == pytest.approx(2 * LOAD)
    assert flow.map.resident[[1, 5]].all()


passes = st.lists(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=3, max_size=3), max_size=12)


@given(
    needs=passes,
    capacity=st.integers(1, 12),
    lookahead=st.one_of(st.none(), st.integers(0, 4)),
    accuracy=st.one_of(st.none(), st.floats(0.05, 1.0)),
    standing=st.sampled_from([0.0, 0.5]),
    in_flight=st.integers(1, 3),
    load=st.sampled_from([0.001, 0.05, 0.5]),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_foreseen_everything_needed_is_there(
    needs: Needs,
    capacity: int,
    lookahead: int | None,
    accuracy: float | None,
    standing: float,
    in_flight: int,
    load: float,
) -> None:
    shape = ModelShape(3, 4, ExpertShape(64, 32))
    average = partial(MovingAverage, shape.layers, shape.experts)
    predictor = average if accuracy is None else partial(Oracle, shape, accuracy, masks(needs, 4))
    options = ForesightOptions(lookahead, 0.2, standing, 2)
    flow, link = make_flow(shape, capacity, predictor, options, in_flight, load)
    run(flow, needs, 4)
    figures = flow.describe()
    assert figures["hits"] + figures["misses"] == sum(len(set(each)) for layers in needs for each in layers)
    assert flow.counters.bytes_moved == figures["loads"] * NBYTES
    assert figures["loads_ahead"] <= figures["loads"] <= len(link.begun)
    assert len(link.begun) - figures["loads"] == np.count_nonzero(flow.map.loading)
    assert figures["load_seconds"] == pytest.approx(figures["loads"] * load) and 0 <= figures["hidden"] <= 1
    assert lookahead != 0 or figures["loads_ahead"] == figures["late"] == figures["cancelled"] == 0


@given(needs=passes, capacity=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_without_reading_ahead_hits_are_those_of_the_engines_cache_alone(needs: Needs, capacity: int) -> None:
    shape, options = ModelShape(3, 4, ExpertShape(64, 32)), ForesightOptions(0)
    flow, _ = make_flow(shape, capacity, partial(MovingAverage, 3, 4), options)
    run(flow, needs, 4)
    foresight = Foresight(MovingAverage(3, 4), 3, capacity, options)
    cache = CacheMap(12, capacity, foresight.policy)
    for mask in masks(needs, 4):
        for layer in range(3):
            counts = mask[4 * layer : 4 * layer + 4].astype(np.int64)
            for group in cache.split(4 * layer + foresight.look_at(layer, counts, 1, None)):
                cache.admit(cache.need(group)[0])
        cache.unpin()
    assert flow.map.describe() == cache.describe() and (flow.map.resident == cache.resident).all()


def simulate_rows(rows: TraceRows, **changes: Any) -> SimulationReport:
    return simulate(SOURCE, replace(FLOW, **changes), COSTS, Rows(rows))


@pytest.mark.parametrize("accuracy", [1.0, 0.85, 0.6])
def test_predictors_are_as_good_as_asked_for(accuracy: float) -> None:
    cache = simulate_rows(make_rows([1] * 300), accuracy=accuracy).cache
    assert cache is not None
    assert cache["recall"] == pytest.approx(accuracy, abs=0.03)
    assert cache["precision"] == pytest.approx(accuracy, abs=0.03)
    assert accuracy < 1 or cache["recall"] == cache["precision"] == 1


def test_better_predictions_wait_less_and_need_the_same() -> None:
    rows = make_rows([1] * 200, shift=100)
    reports = [simulate_rows(rows, accuracy=accuracy, link=2e7) for accuracy in (0.2, 0.6, 1.0)]
    waits, caches = [report.wait_seconds for report in reports], [report.cache for report in reports]
    assert waits[0] > waits[1] > waits[2] > 0
    assert len({cache["hits"] + cache["misses"] for cache in caches if cache}) == 1
    again = simulate_rows(rows, accuracy=0.6, link=2e7)
    assert again.as_json() == reports[1].as_json()


def test_what_is_read_ahead_is_waited_for_less_than_by_the_best_cache_on_demand() -> None:
    rows = make_rows([1] * 200)
    ahead = simulate_rows(rows, accuracy=1.0, link=3e7)
    on_demand = simulate_rows(rows, accuracy=0.5, tune={"lookahead": 0}, link=3e7)
    belady = simulate(SOURCE, replace(FLOW, mode="belady", link=3e7), COSTS, Rows(rows))
    assert ahead.wait_seconds < belady.wait_seconds < on_demand.wait_seconds
    assert ahead.cache and belady.cache and on_demand.cache
    assert belady.cache["hits"] > on_demand.cache["hits"]
    assert ahead.seconds == pytest.approx(200 * 0.004 + ahead.wait_seconds) and 0 < ahead.link_busy <= 1
    assert on_demand.cache["hidden"] == pytest.approx(0, abs=1e-9)


def test_prompts_gaps_and_more_than_there_is_room_for() -> None:
    rows = make_rows([40, 1, 1, 1, 60, 1, 1], prefill=[0, 4])
    report = simulate_rows(rows, expert_memory=7 * MIB // 20, tune={"in_flight": 2}, gaps=True, latency=1e-3)
    assert report.cache and report.cache["capacity"] < 16
    assert report.bytes_moved == report.cache["loads"] * report.expert_bytes / report.cache["capacity"]
    assert report.seconds > 6 * 0.05


class TestHiddenStates:
    """Routers that choose by a state which all layers share: who asks them ahead of time knows everything."""

    head = TraceHead(model="test", layers=3, experts=16, top_k=2, hidden=64, intermediate=64)

    @pytest.fixture
    def routers(self) -> Routers:
        return Routers(np.random.default_rng(1).normal(size=(3, 16, 64)).astype(np.float32), 2)

    @pytest.fixture
    def trace(self, tmp_path: Path, routers: Routers) -> TraceReader:
        random, count = np.random.default_rng(0), 120
        states = random.normal(size=(count, 64)).astype(np.float16)
        scores = np.einsum("th,leh->tle", states.astype(np.float32), routers.weights)
        ids = np.argsort(-scores, 2)[:, :, :2].astype(np.uint16)
        number = np.arange(count)
        rows = TraceRows(
            number.astype(np.int32), 0.1 * number, np.full(count, 0.01, np.float32), np.zeros(count, np.bool_),
            np.zeros(count, np.int32), np.zeros(count, np.int64), ids, None, np.repeat(states[:, None], 3, 1),
        )  # fmt: skip
        writer = TraceWriter(tmp_path / "hidden.parquet", self.head, weights=False, hidden=True)
        writer.add(rows)
        writer.close()
        return TraceReader.open(tmp_path / "hidden.parquet")

    def test_routers_are_asked_ahead_of_time(self, trace: TraceReader, routers: Routers) -> None:
        source = TracedModel(self.head, ExpertShape(64, 64))
        options = SimulationOptions("expertflow", tier="int4", expert_memory=1 << 17, link=1e7)
        average, pregate = (
            simulate(source, replace(options, predictor=name), COSTS, trace, routers=routers).cache
            for name in ("average", "pregate")
        )
        assert average and pregate and pregate["recall"] > average["recall"] + 0.3
        assert pregate["useful"] > average["useful"] and pregate["precision"] > 0.9
        with pytest.raises(OptionError, match="unknown form"):
            simulate(source, replace(options, predictor="pregate"), COSTS, trace)

    def test_a_trace_without_them_is_refused(self, tmp_path: Path, routers: Routers) -> None:
        writer = TraceWriter(tmp_path / "plain.parquet", HEAD, weights=True)
        writer.add(make_rows([1, 1]))
        writer.close()
        reader = TraceReader.open(tmp_path / "plain.parquet")
        with pytest.raises(OptionError, match="pregate looks at hidden states, which the trace does not have"):
            simulate(SOURCE, replace(FLOW, predictor="pregate"), COSTS, reader, routers=routers)


def test_the_engine_and_the_simulator_miss_the_same_where_nothing_is_read_ahead(
    embedded_store: Path, tmp_path: Path
) -> None:
    opened, path = ExpertStore.open(embedded_store), tmp_path / "run.parquet"
    memory = 60 * VersionLayout.of(opened.format("int4"), opened.shape.expert).extent_bytes
    tune = {"lookahead": 0, "standing_share": 0.3, "standing_tokens": 10}
    common = {"mode": "expertflow", "tier": "int4", "expert_memory": memory, "predictor": "average", "tune": tune}
    with LLM(str(embedded_store), slots=1, context=128, trace=path, **common) as llm:
        for text in ("reverse: a b c", "def f(x):", "There are many boxes with coins. " * 3):
            llm.generate(text, max_tokens=12)
        found, moved = llm.launch.runtime.describe_cache(), llm.launch.runtime.counters.bytes_moved
    reader = TraceReader.open(path)
    source = open_source(reader.head, embedded_store, None)
    report = simulate(source, SimulationOptions(link=1e9, **common), COSTS, reader)
    timed = ("load_seconds", "hidden", "queued", "reading")
    assert found and report.cache
    assert {name: value for name, value in report.cache.items() if name not in timed} == {
        name: found[name] for name in report.cache if name not in timed
    }
    assert report.bytes_moved == moved > 0 and report.cache["recall"] > 0
    assert report.wait_seconds == pytest.approx(moved / 1e9)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "lru", "accuracy": 0.9}, "--accuracy goes with --mode expertflow, not 'lru'"),
        ({"mode": "lfu", "predictor": "average"}, "--predictor goes with --mode expertflow"),
        ({"predictor": "psychic"}, "--predictor psychic: not average or pregate, and no file"),
        ({"predictor": "average", "accuracy": 0.9}, "exclude each other"),
        ({"accuracy": 0.0}, "--accuracy 0 is not in"),
        ({"accuracy": 1.5}, "--accuracy 1.5 is not in"),
        ({"accuracy": float("nan")}, "--accuracy nan is not in"),
        ({"accuracy": 0.9, "tune": {"threshold": 0.3}}, "threshold does nothing beside --accuracy"),
        ({"tune": {"alpha": 0.5}}, "alpha does nothing here, where experts are read before they are needed"),
        ({"tune": {"lookahead": -1}}, "lookahead -1 is not in"),
        ({"drag": 0.5}, "do nothing"),
        ({"drive": "replay"}, "--drive does nothing"),
        ({"expert_memory": None}, "needs --expert-memory"),
        ({"tier": None}, "--tier and --mode"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        replace(FLOW, **changes).check()
