"""Sequences that share a cache and take turns have the tokens that they have with all experts resident."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from dynaexq.core import ExpertShape, ModelShape, OptionError
from dynaexq.engine import Engine, EngineOptions, Event, Finish, FinishEvent, Request, TokenEvent
from dynaexq.engine.token_scheduler import TokenScheduler, join_passes
from dynaexq.formats import VersionLayout
from dynaexq.integrations.transformers import DynaExqConfig
from dynaexq.llm import LLM
from dynaexq.policy.regrouping import GRANULARITIES, RegroupingOptions
from dynaexq.server.metrics import Metrics
from dynaexq.server.schedule_metrics import COUNTERS
from dynaexq.server.service import Service
from dynaexq.server.state import StateView
from dynaexq.store import ExpertStore
from dynaexq.traffic.recorder import ClosedWindow, RoutedLayer, TokenRun
from support.scripted_model import ScriptedModel, answer

SHAPE = ModelShape(2, 6, ExpertShape(8, 8))
TEXTS = ("reverse: a b c", "sort: d e f g", "There are many boxes with coins. " * 9, "def f(x):", "One", "x = [1, 2]")
LENGTHS = (30, 12, 20, 25, 3, 16)
AT_ONCE = 4
"""So that some of them wait."""


class RoutedModel(ScriptedModel):
    """Tells a scheduler what routers chose at random; decode steps run in two parts, as some models' do."""

    def __init__(self, slots: int, seed: int) -> None:
        super().__init__(slots, room=40)
        self.scheduler: TokenScheduler | None = None
        self.windows: list[Sequence[TokenRun]] = []
        self._rng = np.random.default_rng(seed)

    @contextmanager
    def window(self, prefill: bool, runs: Sequence[TokenRun]) -> Iterator[None]:
        """Everything within is one step."""
        with super().window(prefill, runs):
            yield
        self.windows.append(runs)
        if self.scheduler:
            half = sum(not run.prefill for run in runs) // 2
            sizes = [half, *[run.tokens for run in runs[half:]]]
            routed = [self._route(layer, size) for size in sizes if size for layer in range(SHAPE.layers)]
            self.scheduler.after_window(ClosedWindow(routed, prefill, np.zeros(12, np.int64), runs=runs))

    def _route(self, layer: int, tokens: int) -> RoutedLayer:
        ids = np.stack([self._rng.permutation(SHAPE.experts)[:2] for _ in range(tokens)])
        return RoutedLayer(layer, torch.from_numpy(ids), torch.ones(tokens, 2))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_answer_is_that_of_the_request_alone(data: st.DataObject) -> None:
    options = RegroupingOptions(
        data.draw(st.sampled_from(GRANULARITIES)),
        quantum=data.draw(st.integers(1, 4)),
        min_batch=data.draw(st.integers(1, 3)),
        timeout_ms=data.draw(st.sampled_from([5.0, 1e4])),
        admit_window=data.draw(st.integers(1, 4)),
    )
    model, ticks = RoutedModel(data.draw(st.integers(1, 6)), data.draw(st.integers(0, 9))), count()

    def clock() -> float:
        return next(ticks) / 1000

    scheduler = TokenScheduler(options, SHAPE, model.slots, data.draw(st.integers(1, 12)), clock)
    model.scheduler = scheduler if options.learns else None
    engine = Engine(model, lambda _: None, EngineOptions(chunk=4, step_tokens=8), clock=clock, scheduler=scheduler)
    asked: list[tuple[Request, list[int], list[FinishEvent]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["submit", "submit", "step", "step", "cancel", "fail"]))
        if action == "submit":
            tokens: list[int] = []
            ends: list[FinishEvent] = []

            def hear(event: Event, tokens: list[int] = tokens, ends: list[FinishEvent] = ends) -> None:
                if isinstance(event, TokenEvent):
                    tokens.append(event.token)
                else:
                    ends.append(event)

            beginning = data.draw(st.sampled_from([(), tuple(range(17))]))
            prompt = (*beginning, *data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=8)))
            request = Request(prompt, data.draw(st.integers(1, 12)), hear, priority=data.draw(st.integers(0, 1)))
            engine.submit(request)
            asked.append((request, tokens, ends))
        elif action == "step":
            engine.step()
        elif action == "cancel" and asked:
            engine.cancel(data.draw(st.sampled_from(asked))[0])
        elif action == "fail" and data.draw(st.integers(0, 3)) == 0:
            model.fail_next = True
    steps = 0
    while engine.step():
        steps += 1
        assert steps < 2000
    for request, tokens, (end,) in asked:
        whole = answer(request.prompt, request.max_tokens)
        assert tokens == (whole if end.reason is Finish.LENGTH else whole[: len(tokens)])
    assert engine.counts().unfinished == 0
    assert not scheduler._slots and not scheduler._regrouper._overtaken
    if options.granularity == "batch":
        assert scheduler.describe()["left_out"] == 0


def test_passes_of_a_step_are_joined_in_the_order_of_its_tokens() -> None:
    rows = [torch.arange(size * 2).reshape(size, 2) + 100 * place for place, size in enumerate((2, 2, 3, 3))]
    routed = [RoutedLayer(place % 2, ids, ids) for place, ids in enumerate(rows)]
    joined = join_passes(routed, 2)
    assert joined is not None and joined[0].tolist() == rows[0].tolist() + rows[2].tolist()
    assert joined[1].tolist() == rows[1].tolist() + rows[3].tolist()
    assert join_passes(routed[:3], 2) is None and join_passes([], 2) is None


def test_requests_like_those_that_run_are_admitted_first() -> None:
    model = RoutedModel(2, 0)
    scheduler = TokenScheduler(RegroupingOptions("batch", admit_window=2), SHAPE, 2, 3)
    model.scheduler = scheduler
    engine = Engine(model, lambda _: None, EngineOptions(), scheduler=scheduler)
    told: list[int] = []
    first, second = tuple(range(20)), tuple(range(20, 40))

    def ask(prompt: tuple[int, ...], tokens: int, number: int) -> None:
        engine.submit(Request(prompt, tokens, lambda event: told.append(number)))

    ask(first, 10, 1)
    ask(second, 2, 2)
    for _ in range(2):
        engine.step()
    scheduler._regrouper.paths.likely[:] = np.eye(2, 12)
    ask((*second[:17], 1), 1, 3)
    ask((*first[:17], 1), 1, 4)
    told.clear()
    while engine.step():
        pass
    assert told.index(4) < told.index(3)
    assert scheduler.describe()["overtaken"] == 1


def extent_of(store: Path) -> int:
    opened = ExpertStore.open(store)
    return VersionLayout.of(opened.format("int4"), opened.shape.expert).extent_bytes


Tokens = list[tuple[int, ...]]


def answers(store: Path, slots: int = AT_ONCE, cancel: bool = False, **options: Any) -> tuple[Tokens, LLM]:
    """Tokens of all TEXTS but those that are cancelled."""
    with LLM(str(store), slots=slots, context=256, engine=EngineOptions(reuse=False), **options) as llm:
        llm.encoder.stop_tokens = frozenset()
        streams = [llm.submit(llm.encoder.encode(text), size) for text, size in zip(TEXTS, LENGTHS, strict=True)]
        if cancel:
            for _ in zip(range(2), streams[3], strict=False):
                pass  # two pieces of it; leaving the iterator cancels the rest
            llm.engine.cancel(streams[5]._request)
        return [stream.wait().tokens for place, stream in enumerate(streams) if not (cancel and place in (3, 5))], llm


@pytest.fixture(scope="module")
def expected(embedded_store: Path) -> Tokens:
    return answers(embedded_store, mode="static", tier="int4")[0]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(("mode", "capacity"), [("lfu", 60), ("lfu", 17), ("lru", 5), ("expertflow", 60), ("lfu", 1)])
def test_tokens_are_those_of_all_experts_resident(
    embedded_store: Path, expected: Tokens, mode: str, capacity: int, granularity: str
) -> None:
    memory = capacity * extent_of(embedded_store)
    options = {"mode": mode, "tier": "int4", "expert_memory": memory, "granularity": granularity}
    tune = {} if granularity == "batch" else {"timeout_ms": 1000.0}
    tokens, llm = answers(embedded_store, tune=tune, **options)
    assert tokens == expected
    scheduler, cache = llm.engine.scheduler, llm.launch.runtime.cache
    assert scheduler is not None and cache is not None
    found = scheduler.describe()
    assert found["granularity"] == granularity and found["steps"] > 20 and found["seconds"] > 0
    assert (found["left_out"] > 0) is (granularity != "batch")
    assert (llm.launch.runtime.watcher is None) is (granularity == "batch")
    cache.check_integrity()


@pytest.mark.parametrize("granularity", ["sequence", "token"])
def test_others_go_on_where_some_are_cancelled(embedded_store: Path, expected: Tokens, granularity: str) -> None:
    memory = 40 * extent_of(embedded_store)
    tokens, llm = answers(
        embedded_store, cancel=True, mode="lfu", tier="int4", expert_memory=memory, granularity=granularity
    )
    assert tokens == [each for place, each in enumerate(expected) if place not in (3, 5)]
    assert llm.engine.scheduler is not None and not llm.engine.scheduler._slots


def test_paths_are_what_a_trace_says(embedded_store: Path, tmp_path: Path) -> None:
    memory = 60 * extent_of(embedded_store)
    options = {"mode": "lfu", "tier": "int4", "expert_memory": memory, "granularity": "token"}
    _, llm = answers(embedded_store, slots=3, **options)
    scheduler = llm.engine.scheduler
    assert scheduler is not None
    likely = scheduler._regrouper.paths.likely.reshape(3, 6, 32)
    assert np.allclose(likely.sum(-1), 4, atol=1e-3)  # every token chooses four experts of each layer
    assert likely.max() <= 1 + 1e-5


def test_what_comes_of_it_is_shown(embedded_store: Path) -> None:
    options = {"mode": "lfu", "tier": "int4", "expert_memory": 60 * extent_of(embedded_store), "granularity": "token"}
    metrics = Metrics()
    with LLM(str(embedded_store), slots=4, context=128, observer=metrics, **options) as llm:
        llm.encoder.stop_tokens = frozenset()
        for stream in [llm.submit(llm.encoder.encode(text), 9) for text in TEXTS[:4]]:
            stream.wait()
        runtime, engine = llm.launch.runtime, llm.engine
        metrics.watch(engine, runtime)
        state = StateView(Service("m", engine, llm.encoder, 0), runtime, metrics.pace).describe()["scheduling"]
        shown = generate_latest(metrics.registry).decode()
        assert state["granularity"] == "token" and state["left_out"] > 0 and state["groups"] == 0
        assert 'dynaexq_schedule_info{granularity="token"} 1.0' in shown
        assert all(f"\ndynaexq_schedule_{name}_total {float(state[name])}\n" in shown for name in COUNTERS)


def test_options_that_would_do_nothing_are_refused(embedded_store: Path) -> None:
    cached = {"mode": "lfu", "tier": "int4", "expert_memory": 60 * extent_of(embedded_store)}
    for options, words in (
        ({"mode": "static", "tier": "int4", "granularity": "token"}, "--granularity goes with --mode lru"),
        ({"mode": "static", "tier": "int4", "tune": {"quantum": 2}}, "--tune goes with"),
        ({"tune": {"quantum": 2}}, "quantum does nothing here, where no sequences share"),
        ({**cached, "granularity": "layer"}, "unknown granularity 'layer'; known are batch, sequence, token"),
        ({**cached, "tune": {"timeout_ms": 5.0}}, "timeout_ms does nothing at granularity batch"),
        ({**cached, "granularity": "token", "tune": {"quantum": 2}}, "quantum does nothing at granularity token"),
        ({**cached, "granularity": "token", "slots": 2}, "does nothing with 2 sequences at a time"),
        ({**cached, "granularity": "sequence", "slots": 1}, "does nothing with 1 sequence at a time"),
        ({**cached, "slots": 1, "tune": {"admit_window": 2}}, "admit_window does nothing with one sequence"),
        ({**cached, "granularity": "sequence", "tune": {"quantum": 0}}, "quantum is 0; it goes from 1 to 1024"),
    ):
        with pytest.raises(OptionError, match=words):
            LLM(str(embedded_store), **{"mode": "dynaexq", **options})
    with pytest.raises(OptionError, match="min_batch does nothing here"):
        DynaExqConfig("lfu", "int4", expert_memory=1 << 20, tuning={"min_batch": 3})
