"""Simulated runs: the engine's transitions, the same numbers however passes are put together, and hand-made cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynaexq.core import ExpertShape, MemoryLimitError, OptionError
from dynaexq.integrations.transformers import DynaExqConfig, runtime_of
from dynaexq.integrations.transformers.loading import load_model
from dynaexq.simulate.costs import Line, StepCosts
from dynaexq.simulate.feed import read_blocks
from dynaexq.simulate.options import SimulationOptions
from dynaexq.simulate.report import simulate
from dynaexq.simulate.run import Simulation
from dynaexq.simulate.trace_source import TracedModel, open_source
from dynaexq.traffic.trace import TraceHead, TraceReader, TraceRows
from dynaexq.traffic.trace_writer import TraceWriter

MIB = 1 << 20
LINE = Line(start=0.004, token=0.001, byte=1e-10)
COSTS = StepCosts(decode=LINE, prefill=LINE)
HEAD = TraceHead(model="test", layers=4, experts=16, top_k=2, hidden=256, intermediate=128)
SOURCE = TracedModel(HEAD, ExpertShape(256, 128))
MOVING = SimulationOptions("dynaexq", high="int8", low="int2", expert_memory=3 * MIB, link=1e8)


def make_rows(tokens: list[int], seed: int = 0, prefill: Any = (), shift: int | None = None) -> TraceRows:
    """Passes of so many tokens each, Zipf traffic that `shift` passes from the start turns to other experts."""
    random, total = np.random.default_rng(seed), sum(tokens)
    popular = np.log(1 / np.arange(1, HEAD.experts + 1))
    window = np.repeat(np.arange(len(tokens)), tokens)
    scores = random.gumbel(size=(total, HEAD.layers, HEAD.experts)) + popular
    if shift is not None:
        scores[window >= shift] = scores[window >= shift][:, :, ::-1]
    ids = np.argsort(-scores, 2)[:, :, : HEAD.top_k].astype(np.uint16)
    return TraceRows(
        window.astype(np.int32),
        0.05 * window.astype(np.float64),
        np.full(total, 0.01, np.float32),
        np.isin(window, list(prefill)),
        np.concatenate([np.arange(count) for count in tokens]).astype(np.int32),
        np.zeros(total, np.int64),
        ids,
        random.random((total, HEAD.layers, HEAD.top_k)).astype(np.float32),
    )


class Rows:
    """A trace in memory, in pieces."""

    has_weights = True

    def __init__(self, rows: TraceRows, pieces: int = 3) -> None:
        self.head, self._rows, self._pieces = HEAD, rows, pieces

    def batches(self, weights: bool = False, hidden: bool = False) -> Any:
        for part in np.array_split(np.arange(len(self._rows.window)), self._pieces):
            cut = self._rows.cut(part)
            yield cut if weights else cut._replace(weights=None)


@pytest.mark.parametrize("pieces", [1, 2, 7, 40])
def test_passes_are_whole_wherever_a_trace_is_cut(pieces: int) -> None:
    rows = make_rows([5, 1, 1, 3, 8, 1, 2], prefill=[0, 4])
    found = list(read_blocks(Rows(rows, pieces)))
    assert np.concatenate([block.tokens for block in found]).tolist() == [5, 1, 1, 3, 8, 1, 2]
    assert np.concatenate([block.prefill for block in found]).tolist() == [
        True,
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    places = np.concatenate([block.places for block in found]).reshape(rows.ids.shape)
    assert (places == rows.ids + 16 * np.arange(4)[:, None]).all()


def test_a_static_run_takes_what_its_costs_say() -> None:
    rows = make_rows([1, 4, 1])
    report = simulate(SOURCE, SimulationOptions("static", tier="int4"), COSTS, Rows(rows))
    size = 256 * 128 * 3 * 4.5 / 8
    distinct = [len({(layer, each) for token in part for layer, row in enumerate(token) for each in row}) for part in (
        rows.ids[:1].tolist(), rows.ids[1:5].tolist(), rows.ids[5:].tolist()
    )]  # fmt: skip
    seconds = 3 * 0.004 + 6 * 0.001 + 1e-10 * report.expert_bytes / 64 * sum(distinct)
    assert report.seconds == pytest.approx(seconds) and report.tokens == 6 and report.passes == 3
    assert report.expert_bytes >= 64 * size and report.by_tier == [1.0] and report.raised == 0


def test_the_paces_of_requests_are_theirs() -> None:
    """Two requests: a prompt of one pass each, then three common decode passes."""
    rows = make_rows([4, 6, 2, 2, 2], prefill=[0, 1])
    request = np.array([0] * 4 + [1] * 6 + [0, 1] * 3, np.int32)
    flat = StepCosts(decode=Line(start=0.01), prefill=Line(start=0.1))
    report = simulate(SOURCE, SimulationOptions("static", tier="int4"), flat, Rows(rows._replace(request=request)))
    assert report.ttft is not None and report.tpot is not None
    assert report.ttft.mean == pytest.approx(0.1) and report.seconds == pytest.approx(0.23)
    assert sorted([report.tpot.p50, report.tpot.p99]) == pytest.approx([0.01, 0.1055], rel=0.06)  # one waited 0.11 s
    assert report.decode_tokens_per_second == pytest.approx(6 / 0.03)


@pytest.mark.parametrize("mode", ["dynaexq", "no-hysteresis", "blocking"])
def test_calm_passes_together_are_passes_one_by_one(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows([1] * 150 + [4] * 150 + [1] * 150, prefill=range(20, 30), shift=200)
    options = replace(MOVING, mode=mode)
    together = simulate(SOURCE, options, COSTS, Rows(rows))
    monkeypatch.setattr(Simulation, "_calm", False)
    apart = simulate(SOURCE, options, COSTS, Rows(rows, 1))
    assert together.promotions > 0 and together.bytes_moved > 0
    for name, value in together.as_json().items():
        if name in ("ttft", "tpot", "by_tier", "recoveries"):
            assert np.allclose(np.array(_numbers(value)), np.array(_numbers(apart.as_json()[name]))), name
        else:
            assert value == pytest.approx(apart.as_json()[name]), name


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [each for item in value.values() for each in _numbers(item)]
    if isinstance(value, list):
        return [each for item in value for each in _numbers(item)]
    return [] if value is None else [float(value)]


def test_traffic_decides_and_a_faster_link_decides_sooner() -> None:
    rows = make_rows([8] * 400, shift=200)
    slow, fast = (simulate(SOURCE, replace(MOVING, link=link), COSTS, Rows(rows)) for link in (1e6, 1e9))
    even = 3 * MIB / (64 * 256 * 128 * 3 / 8)
    assert even < 8 and fast.raised > slow.raised > 0.3 and fast.waits == 0
    assert fast.promotions > 0 and fast.link_busy < slow.link_busy <= 1


def test_blocking_waits_and_says_so() -> None:
    rows = make_rows([8] * 100, shift=50)
    background, blocking = (
        simulate(SOURCE, replace(MOVING, mode=mode), COSTS, Rows(rows)) for mode in ("dynaexq", "blocking")
    )
    assert blocking.waits > 0 and blocking.wait_seconds == pytest.approx(blocking.bytes_moved / 1e8, rel=0.02)
    assert blocking.seconds > background.seconds and background.wait_seconds == 0


def test_copies_make_passes_longer_where_they_take_a_core() -> None:
    rows = make_rows([8] * 200, shift=100)
    free, dear = (simulate(SOURCE, replace(MOVING, drag=drag), COSTS, Rows(rows)) for drag in (0.0, 0.5))
    copied = dear.bytes_moved / 1e8
    assert dear.seconds - free.seconds == pytest.approx(0.5 * copied, rel=0.25) and dear.tpot.p99 > free.tpot.p99
    with pytest.raises(OptionError, match="a drag of 2"):
        simulate(SOURCE, replace(MOVING, drag=2), COSTS, Rows(rows))


def test_gaps_are_kept_where_asked_for() -> None:
    rows = make_rows([1] * 40)
    for mode in (SimulationOptions("static", tier="int2"), MOVING):
        dense, spaced = (simulate(SOURCE, replace(mode, gaps=gaps), COSTS, Rows(rows)) for gaps in (False, True))
        assert dense.seconds < 40 * 0.006 and spaced.seconds == pytest.approx(39 * 0.05 + 0.005, abs=0.001)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "fast"}, "unknown mode 'fast'"),
        ({"tier": "int4"}, "--tier and --mode static or lru or two-tier or lfu or belady or expertflow go together"),
        ({"expert_memory": None}, "needs --expert-memory"),
        ({"high": "int2", "low": "int8"}, "not above"),
        ({"high": None}, "needs --high and --low"),
        ({"tune": {"every_windows": 2}}, "does nothing here"),
        ({"profile": Path("map.json")}, "go together"),
        ({"link": 0.0}, "no copy would end"),
        ({"high": "int9"}, "unknown tier 'int9'"),
        ({"drive": "replay", "drag": 0.5}, "--latency and --drag do nothing"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        simulate(SOURCE, replace(MOVING, **changes), COSTS, Rows(make_rows([1])))


def test_too_few_bytes_are_refused_with_the_floor() -> None:
    with pytest.raises(MemoryLimitError, match="below the floor 2.0 MiB"):
        simulate(SOURCE, replace(MOVING, expert_memory=MIB), COSTS, Rows(make_rows([1])))


@pytest.mark.parametrize("tune", [{}, {"every_windows": 3, "signal": "mass", "alpha": 0.5}])
def test_the_engine_and_the_simulator_take_the_same_transitions(
    embedded_store: Path, tmp_path: Path, tune: dict[str, Any]
) -> None:
    config = DynaExqConfig(
        mode="dynaexq", high="int8", low="int2", expert_memory=9 * MIB, drive="replay", tuning=tune,
        record=str(tmp_path / "engine.jsonl"),
    )  # fmt: skip
    model = load_model(embedded_store, config, torch.float32)
    control = runtime_of(model).control
    assert control is not None
    windows, seen = [], control.after_window
    control.after_window = lambda window: (windows.append(window), seen(window))  # type: ignore[method-assign,func-returns-value,assignment]
    texts = torch.randint(0, 4000, (24, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for place, text in enumerate(texts):
            model(text[None] % (200 if place < 12 else 3000))
    runtime_of(model).close()
    rows = []
    for number, window in enumerate(windows):
        ids = torch.stack([layer.ids for layer in window.layers], 1).numpy().astype(np.uint16)
        weights = torch.stack([layer.weights for layer in window.layers], 1).float().numpy()
        count = len(ids)
        rows.append(
            TraceRows(
                np.full(count, number, np.int32), np.zeros(count), np.full(count, 0.01, np.float32),
                np.full(count, window.prefill), np.zeros(count, np.int32), np.zeros(count, np.int64), ids, weights,
            )
        )  # fmt: skip
    head = TraceHead(model="embedded", layers=6, experts=32, top_k=ids.shape[2])
    writer = TraceWriter(tmp_path / "trace.parquet", head, weights=True)
    for each in rows:
        writer.add(each)
    writer.close()
    reader = TraceReader.open(tmp_path / "trace.parquet")
    options = SimulationOptions(
        "dynaexq", high="int8", low="int2", expert_memory=9 * MIB, drive="replay", tune=tune,
        record=tmp_path / "simulated.jsonl",
    )  # fmt: skip
    report = simulate(open_source(reader.head, embedded_store, None), options, COSTS, reader)
    assert report.promotions == control.pipeline.counters.promotions > 20
    assert (tmp_path / "simulated.jsonl").read_bytes() == (tmp_path / "engine.jsonl").read_bytes()
    assert report.raised == pytest.approx(control.shares.raised, abs=1e-6 if not tune else 0.1)
