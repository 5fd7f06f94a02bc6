"""The engine on a scripted model: every answer is what it would be alone, whatever else is going on."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaexq.core import MemoryLimitError, OptionError
from dynaexq.engine import (
    Engine,
    EngineClosedError,
    EngineOptions,
    Event,
    Finish,
    FinishEvent,
    QueueFullError,
    Request,
    Sampling,
    ScoredEvent,
    Scores,
    StepReport,
    TokenEvent,
    TooLongError,
)
from dynaexq.engine.scheduler import Chunk, plan_chunks
from support.scripted_model import VOCABULARY, ScriptedModel, answer, next_token


@dataclass
class Heard:
    """Everything a request was told."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishEvent | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        assert self.finish is None, "told something after the end"
        if isinstance(event, TokenEvent):
            self.tokens.append(event.token)
        else:
            self.finish = event
            self.done.set()


def ask(prompt: list[int], count: int = 4, **options: object) -> tuple[Request, Heard]:
    heard = Heard()
    return Request(tuple(prompt), count, heard, **options), heard  # type: ignore[arg-type]


def make_engine(model: ScriptedModel | None = None, **options: object) -> Engine:
    return Engine(model or ScriptedModel(), lambda _: None, EngineOptions(**options))  # type: ignore[arg-type]


def run(engine: Engine) -> int:
    steps = 0
    while engine.step():
        steps += 1
        assert steps < 10_000
    return steps


PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=24)
"""Few tokens, so that beginnings are often shared."""


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_answer_is_that_of_the_request_alone(data: st.DataObject) -> None:
    cuts = data.draw(st.booleans(), "cuts")
    model = ScriptedModel(data.draw(st.integers(1, 4), "slots"), 40, data.draw(st.booleans(), "chunked"), cuts)
    chunk, budget = data.draw(st.integers(1, 9), "chunk"), data.draw(st.integers(1, 12), "budget")
    engine = make_engine(model, chunk=chunk, step_tokens=budget, reuse=data.draw(st.booleans(), "reuse"))
    asked: list[tuple[Request, Heard]] = []
    cancelled: set[int] = set()
    for _ in range(data.draw(st.integers(1, 25), "actions")):
        action = data.draw(st.sampled_from(["submit", "submit", "step", "step", "cancel", "fail"]))
        if action == "submit":
            stops = frozenset(data.draw(st.sets(st.integers(0, VOCABULARY - 1), max_size=12)))
            request, heard = ask(
                data.draw(PROMPTS),
                data.draw(st.integers(1, 12)),
                stop_tokens=stops,
                priority=data.draw(st.integers(0, 2)),
            )
            engine.submit(request)
            asked.append((request, heard))
        elif action == "step":
            engine.step()
        elif action == "cancel" and asked:
            request, _ = data.draw(st.sampled_from(asked))
            engine.cancel(request)
            cancelled.add(request.number)
        elif action == "fail" and data.draw(st.integers(0, 3)) == 0:
            model.fail_next = True
    run(engine)
    for request, heard in asked:
        whole = answer(request.prompt, request.max_tokens, request.stop_tokens)
        assert heard.finish is not None
        assert heard.finish.generated_tokens == len(heard.tokens)
        if heard.finish.reason in (Finish.CANCELLED, Finish.FAILED):
            assert heard.tokens == whole[: len(heard.tokens)]
            assert heard.finish.reason is Finish.FAILED or request.number in cancelled
        else:
            assert heard.tokens == whole
            ended = len(whole) < request.max_tokens
            assert heard.finish.reason is (Finish.STOP if ended else Finish.LENGTH)
        assert heard.finish.reused_tokens < len(request.prompt)
    counts = engine.counts()
    assert (counts.waiting, counts.running, counts.slots_free) == (0, 0, model.slots)
    assert counts.unfinished == 0 and counts.submitted == len(asked)
    for prompt, decoded in model.steps:
        longest = chunk if model.chunked else 24
        assert prompt <= max(budget - decoded, longest)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=6), st.integers(0, 9), st.integers(1, 40))
def test_chunks_fill_a_step_and_no_more(prompts: list[tuple[int, int]], decoding: int, budget: int) -> None:
    prompts = [(min(done, length - 1), length) for done, length in prompts]
    chosen = plan_chunks(prompts, decoding, budget, 8)
    done = dict(enumerate(start for start, _ in prompts))
    for index, piece in chosen:
        assert piece.start == done[index] and 0 < piece.end - piece.start <= 8
        assert piece.end % 8 == 0 or piece.end == prompts[index][1]
        done[index] = piece.end
    sizes = [piece.end - piece.start for _, piece in chosen]
    assert bool(chosen) == bool(prompts)
    assert len(sizes) <= 1 or sum(sizes) + decoding <= budget
    assert [index for index, _ in chosen] == sorted(index for index, _ in chosen)


def test_a_prompt_is_cut_the_same_way_alone_and_among_others() -> None:
    assert plan_chunks([(0, 20)], 0, 100, 8) == [(0, Chunk(0, 8)), (0, Chunk(8, 16)), (0, Chunk(16, 20))]
    assert plan_chunks([(3, 20)], 50, 4, 8) == [(0, Chunk(3, 8))]
    assert plan_chunks([(3, 20)], 0, 4, None) == [(0, Chunk(3, 20))]


def test_a_long_prompt_does_not_stop_the_others() -> None:
    model = ScriptedModel(room=200)
    engine = make_engine(model, step_tokens=8, chunk=8)
    quick, heard = ask([1, 2], 30)
    engine.submit(quick)
    engine.step()
    engine.submit(ask([3] * 150)[0])
    before = len(heard.tokens)
    for _ in range(10):
        engine.step()
    assert len(heard.tokens) == before + 10
    assert all(prompt <= 8 for prompt, _ in model.steps)


def test_a_conversation_that_goes_on_finds_its_beginning() -> None:
    engine = make_engine(ScriptedModel(slots=2))
    first, heard = ask([5, 6, 7, 8], 4)
    engine.submit(first)
    run(engine)
    conversation = [5, 6, 7, 8, *heard.tokens]
    other, _ = ask([9, 9], 2)
    engine.submit(other)
    run(engine)
    again, told = ask([*conversation, 1, 2], 3)
    engine.submit(again)
    run(engine)
    assert told.finish and told.finish.reused_tokens == 7  # the last token of an answer was never computed
    assert told.tokens == answer([*conversation, 1, 2], 3)


def test_a_beginning_in_a_busy_slot_is_copied() -> None:
    engine = make_engine(ScriptedModel(slots=3), chunk=4, step_tokens=4)
    prompt = list(range(20))
    requests = [ask(prompt, 6) for _ in range(2)]
    engine.submit(requests[0][0])
    for _ in range(5):
        engine.step()
    engine.submit(requests[1][0])
    run(engine)
    for _, heard in requests:
        assert heard.tokens == answer(prompt, 6)
    assert requests[1][1].finish and requests[1][1].finish.reused_tokens == 19


def test_recurrent_slots_are_reused_whole_or_not_at_all() -> None:
    engine = make_engine(ScriptedModel(slots=1, cuts=False))
    first, heard = ask([1, 2, 3], 3)
    engine.submit(first)
    run(engine)
    held = [1, 2, 3, *heard.tokens[:-1]]
    for prompt, reused in (([*held[:-1], 60, 61], 0), ([1, 2, 3, 4], 0)):
        request, told = ask(prompt, 1)
        engine.submit(request)
        run(engine)
        assert told.finish and told.finish.reused_tokens == reused
    request, told = ask([1, 2, 3, 4, 5], 2)  # what the last one left, and more
    engine.submit(request)
    run(engine)
    assert told.finish and told.finish.reused_tokens == 4
    assert told.tokens == answer([1, 2, 3, 4, 5], 2)


def test_priority_then_arrival() -> None:
    engine = make_engine(ScriptedModel(slots=1))
    order: list[int] = []
    for number, priority in enumerate([0, 0, 5, 5]):
        engine.submit(Request((number + 1,), 1, lambda _, n=number: order.append(n), priority=priority))  # type: ignore[misc]
    run(engine)
    assert order[::2] == [2, 3, 0, 1]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_cancelled_within_one_step(steps: int) -> None:
    engine = make_engine(ScriptedModel(slots=1), chunk=4, step_tokens=4)
    request, heard = ask(list(range(10)), 20)
    waiting, told = ask([1], 2)
    engine.submit(request)
    engine.submit(waiting)
    for _ in range(steps):
        engine.step()
    engine.cancel(request)
    engine.cancel(request)
    engine.step()
    assert heard.finish and heard.finish.reason is Finish.CANCELLED
    run(engine)
    assert told.tokens == answer([1], 2)
    engine.cancel(request)  # long gone
    assert not engine.step()


def test_refusals_name_the_numbers() -> None:
    engine = make_engine(ScriptedModel(slots=1, room=16), queue=2)
    with pytest.raises(TooLongError, match="12 tokens of prompt and 5 of answer are 17; a sequence has room for 16"):
        engine.submit(ask([1] * 12, 5)[0])
    for bad in (ask([], 1)[0], ask([1], 0)[0], ask([VOCABULARY], 1)[0], ask([-1], 1)[0]):
        with pytest.raises(OptionError):
            engine.submit(bad)
    for _ in range(2):
        engine.submit(ask([1], 2)[0])
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        engine.submit(ask([1], 2)[0])
    engine.drain()
    with pytest.raises(EngineClosedError):
        engine.submit(ask([1], 2)[0])
    assert run(engine) > 0 and engine.counts().finished["length"] == 2


def test_a_failing_model_fails_what_runs_and_serves_on() -> None:
    model = ScriptedModel(slots=1)
    engine = make_engine(model)
    victim, heard = ask([1, 2], 5)
    after, told = ask([1, 2, 3], 3)
    engine.submit(victim)
    engine.submit(after)
    engine.step()
    model.fail_next = True
    run(engine)
    assert heard.finish and heard.finish.reason is Finish.FAILED and heard.finish.error == "RuntimeError: scripted"
    assert told.tokens == answer([1, 2, 3], 3) and told.finish and told.finish.reused_tokens == 0


def test_a_memory_limit_that_was_passed_ends_the_engine() -> None:
    model = ScriptedModel(slots=1)
    model.fail_next, model.error = True, MemoryLimitError("above the limit")
    engine = make_engine(model)
    asked = [ask([n], 5) for n in range(2)]
    for request, _ in asked:
        engine.submit(request)
    engine.start()
    for _, heard in asked:
        assert heard.done.wait(60) and heard.finish
        assert heard.finish.reason is Finish.FAILED
    assert engine.ended
    with pytest.raises(EngineClosedError):
        engine.submit(ask([1])[0])
    engine.close()


def test_a_listener_that_raises_is_dropped() -> None:
    engine = make_engine()

    def broken(event: Event) -> None:
        raise RuntimeError("gone")

    engine.submit(Request((1, 2), 50, broken))
    well, heard = ask([3], 5)
    engine.submit(well)
    run(engine)
    assert heard.tokens == answer([3], 5) and engine.counts().finished["cancelled"] == 1


def test_the_observer_sees_steps_and_ends() -> None:
    seen: list[StepReport | FinishEvent] = []

    class Watcher:
        def on_step(self, report: StepReport) -> None:
            seen.append(report)

        def on_finish(self, event: FinishEvent) -> None:
            seen.append(event)

    ticks = iter(range(10_000))
    engine = Engine(ScriptedModel(), lambda _: None, observer=Watcher(), clock=lambda: float(next(ticks)))
    request, heard = ask([1, 2, 3], 2)
    engine.submit(request)
    run(engine)
    steps = [each for each in seen if isinstance(each, StepReport)]
    assert [(each.prompt_tokens, each.decoded_tokens) for each in steps] == [(3, 0), (0, 1)]
    assert all(0 < each.model_seconds <= each.seconds for each in steps)
    (end,) = [each for each in seen if isinstance(each, FinishEvent)]
    assert end is heard.finish and end.ttft_seconds is not None
    assert 0 < end.queue_seconds < end.ttft_seconds < end.seconds


def test_a_thread_serves_until_it_is_closed() -> None:
    engine = make_engine(ScriptedModel(slots=4, room=4000))
    engine.start()
    asked = [ask([n, n + 1], 20) for n in range(12)]
    for request, _ in asked:
        engine.submit(request)
    for request, heard in asked:
        assert heard.done.wait(60)
        assert heard.tokens == answer(request.prompt, 20)
    endless, heard = ask([1], 3999)
    engine.submit(endless)
    engine.close()
    assert heard.finish and heard.finish.reason in (Finish.CANCELLED, Finish.LENGTH)
    with pytest.raises(EngineClosedError):
        engine.submit(ask([1])[0])


def test_a_grammar_ends_the_answer() -> None:
    class TwoTokens:
        left = 2

        def mask(self, logits: torch.Tensor) -> torch.Tensor:
            return torch.where(torch.arange(VOCABULARY) == 10 + self.left, 0.0, -torch.inf)

        def accept(self, token: int) -> None:
            self.left -= 1

        @property
        def complete(self) -> bool:
            return self.left == 0

    engine = make_engine()
    request, heard = ask([1], 9, constraint=TwoTokens())
    engine.submit(request)
    run(engine)
    assert heard.tokens == [12, 11] and heard.finish and heard.finish.reason is Finish.STOP


def test_options_out_of_range() -> None:
    with pytest.raises(OptionError, match="chunk is 0"):
        make_engine(chunk=0)
    engine = make_engine()
    for bad in (
        Sampling(temperature=-1),
        Sampling(temperature=float("nan")),
        Sampling(top_p=0),
        Sampling(top_p=1.1),
        Sampling(min_p=2),
        Sampling(top_k=VOCABULARY + 1),
        Sampling(presence=3),
        Sampling(repetition=0),
        Sampling(bias={VOCABULARY: 1.0}),
        Sampling(bias={1: 101.0}),
        Sampling(logprobs=21),
    ):
        with pytest.raises(OptionError):
            engine.submit(ask([1], sampling=bad)[0])


@pytest.mark.parametrize("start", [0, 1, 5, 11])
def test_prompts_are_scored_from_a_place_on(start: int) -> None:
    events: list[Event] = []
    engine = make_engine(chunk=8, score_tokens=3)
    prompt = (1, 2, *answer((1, 2), 5), 9, 9, 9, *answer((3,), 4))
    engine.submit(Request(prompt, 2, events.append, scores=Scores(2, start)))
    engine.submit(Request(prompt[:3], 0, lambda _: None, scores=Scores()))
    while engine.step():
        pass
    scored = [token for event in events if isinstance(event, ScoredEvent) for token in event.tokens]
    assert [token.token for token in scored] == list(prompt[start:])
    for place, token in enumerate(scored, start):
        if place == 0:
            assert token == TokenEvent(prompt[0])
            continue
        likely = next_token(prompt[:place])
        assert token.logprob is not None and (token.logprob > -0.1) is (likely == token.token)
        assert token.alternatives[0].token == likely and len(token.alternatives) == 2
    assert [event.token for event in events if isinstance(event, TokenEvent)] == answer(prompt, 2)
    assert engine.counts().finished["length"] == 2


def test_what_cannot_be_scored() -> None:
    whole = make_engine(ScriptedModel(chunked=False), score_tokens=3)
    with pytest.raises(OptionError, match="up to 3 tokens can be scored"):
        whole.submit(Request((1,) * 4, 1, lambda _: None, scores=Scores()))
    with pytest.raises(OptionError, match="at least one token"):
        whole.submit(Request((1,), 0, lambda _: None))
