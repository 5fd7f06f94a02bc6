"""The official client against a real server on the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.llm import LLM
from dynaexq.server.limits import Limits, is_local
from dynaexq.server.metrics import Metrics
from support.serving import Reply, request, serve_app, wait_for

MESSAGES: list[Any] = [{"role": "user", "content": "reverse: a b c"}]
KEY = "a key"


class Running:
    """A server and its parts."""

    def __init__(self, llm: LLM, port: int) -> None:
        self.llm, self.port = llm, port
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        return request(self.port, "POST", path, body, Authorization=f"Bearer {KEY}", **headers)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    patch = pytest.MonkeyPatch()
    patch.setenv("DYNAEXQ_CACHE", str(tmp_path_factory.mktemp("cache")))
    metrics = Metrics()
    with LLM(str(EMBEDDED_MODEL), slots=4, context=256, mode="static", tier="int4", observer=metrics) as llm:
        metrics.watch(llm.engine, llm.launch.runtime)
        with serve_app(llm, metrics, Limits(KEY, 100_000)) as port:
            yield Running(llm, port)
    patch.undo()


def test_models(running: Running) -> None:
    (model,) = running.client.models.list().data
    assert model.id == "demo" and running.client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not here; this server has 'demo'"):
        running.client.models.retrieve("gpt-4")


def test_chat_whole_and_streamed_are_what_the_library_says(running: Running) -> None:
    expected = running.llm.chat(MESSAGES, max_tokens=24)
    options: Any = {"model": "demo", "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0}
    whole = running.client.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == expected.finish.reason.value
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == expected.finish.prompt_tokens
    assert whole.usage.completion_tokens == len(expected.tokens)
    chunks = list(
        running.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [
        expected.finish.reason.value
    ]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_raw_stream_ends_with_done(running: Running) -> None:
    reply = running.post(
        "/v1/chat/completions", {"model": "demo", "messages": MESSAGES, "max_tokens": 3, "stream": True}
    )
    assert reply.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in reply.body.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"


def test_plain_completions(running: Running) -> None:
    create = running.client.completions.create
    text = running.llm.generate("The ", max_tokens=8).text
    assert create(model="demo", prompt="The ", max_tokens=8, temperature=0).choices[0].text == text
    tokens = list(running.llm.encoder.encode("The "))
    assert create(model="demo", prompt=tokens, max_tokens=8, temperature=0).choices[0].text == text
    several = create(model="demo", prompt=["The ", "A "], max_tokens=8, temperature=0, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in several.choices[:2]] == [text, text]
    streamed = create(model="demo", prompt="The ", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text
    assert create(model="demo", prompt="The ").usage.completion_tokens <= 16  # type: ignore[union-attr]


def test_choices_and_seeds(running: Running) -> None:
    def texts(seed: int) -> list[str]:
        answer = running.client.completions.create(
            model="demo", prompt="The ", max_tokens=12, n=3, temperature=1.5, seed=seed
        )
        return [choice.text for choice in answer.choices]

    assert texts(5) == texts(5) and len(set(texts(5))) > 1
    assert texts(5) != texts(6)


def test_stop_strings_are_not_shown(running: Running) -> None:
    text = running.llm.generate("The ", max_tokens=24).text
    stop = text[8:12]
    answer = running.client.completions.create(model="demo", prompt="The ", max_tokens=24, temperature=0, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)] and answer.choices[0].finish_reason == "stop"
    wait_for(lambda: running.llm.engine.counts().running == 0)  # the rest was cancelled


def test_logprobs(running: Running) -> None:
    answer = running.client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == answer.choices[0].message.content
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob <= 0
    plain = running.client.completions.create(model="demo", prompt="The ", max_tokens=4, temperature=0, logprobs=2)
    assert plain.choices[0].logprobs is not None
    assert "".join(plain.choices[0].logprobs.tokens or []) == plain.choices[0].text


def test_sixteen_at_once_say_what_each_says_alone(running: Running) -> None:
    prompts = [f"There are {n} boxes with {n + 2} coins in each box." for n in range(16)]
    alone = [running.llm.generate(prompt, max_tokens=16).tokens for prompt in prompts]

    def ask(prompt: str) -> str:
        stream = running.client.completions.create(
            model="demo", prompt=prompt, max_tokens=16, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, prompts))
    assert together == [running.llm.encoder.decode(list(tokens)) for tokens in alone]


FORM: dict[str, Any] = {"type": "json_schema"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_follow_a_schema(running: Running, temperature: float) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    answer = running.client.chat.completions.create(
        model="demo", messages=MESSAGES, temperature=temperature, seed=1, max_tokens=120, n=2, response_format=form
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        thing = json.loads(choice.message.content or "")
        assert set(thing) == {"name", "count", "kind"} and thing["kind"] in ("a", "b")
        assert isinstance(thing["count"], int)


def test_answers_follow_a_regular_expression(running: Running) -> None:
    answer = running.client.completions.create(
        model="demo", prompt="The ", max_tokens=40, temperature=1.0, extra_body={"guided_regex": "(ab|cd){3}[0-9]{2}"}
    )
    assert re.fullmatch("(ab|cd){3}[0-9]{2}", answer.choices[0].text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frobnicate": 1}, "unsupported parameter: frobnicate"),
        ({"tool_choice": "auto"}, "go with tools"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}},
            "type must be a string",
        ),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "not both"),
        ({"guided_regex": "(("}, "grammar"),
        ({"temperature": 3}, "temperature"),
        ({"n": 17}, "n:"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "not both"),
        ({"stream_options": {"include_usage": True}}, "stream_options go with stream"),
        ({"top_logprobs": 2}, "top_logprobs goes with logprobs"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 100_000}, "room for 256"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "room for 256"),
        ({"seed": -1}, "seed"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(running: Running, change: dict[str, Any], message: str) -> None:
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 4, **change}
    if "max_completion_tokens" not in change and "max_tokens" not in change:
        del body["max_tokens"]
    reply = running.post("/v1/chat/completions", body)
    assert reply.status == 400 and message in reply.error["message"], reply.body
    assert reply.error["type"] == "invalid_request_error"


def test_keys_bodies_and_paths(running: Running) -> None:
    assert request(running.port, "GET", "/health").json == {"status": "ok"}
    assert request(running.port, "GET", "/ready").status == 200
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert request(running.port, "GET", path).error["code"] == "invalid_api_key"
    wrong = request(running.port, "GET", "/v1/models", Authorization="Bearer other")
    assert wrong.status == 401 and KEY not in wrong.body
    assert running.post("/v1/chat/completions", b"{").error["message"] == "the body is not valid JSON"
    assert running.post("/v1/chat/completions", b" " * 100_001).status == 413
    chunked = running.post("/v1/chat/completions", iter([b" " * 60_000] * 2))
    assert chunked.status == 413 and chunked.error["code"] == "body_too_large"
    assert running.post("/v1/nothing", {}).status == 404
    assert request(running.port, "GET", "/v1/chat/completions", Authorization=f"Bearer {KEY}").status == 405


def test_prompts_are_scored_as_evaluation_harnesses_ask(running: Running) -> None:
    """echo with logprobs: every token of the prompt, the first without; the sum is that of a forward over all."""
    prompt = list(running.llm.encoder.encode("There are 7 boxes with 4 coins in each box, and one more."))
    options: Any = {"model": "demo", "echo": True, "logprobs": 2, "temperature": 0}
    whole = running.client.completions.create(prompt=[prompt, prompt[:5]], max_tokens=1, **options)
    text, short = whole.choices
    assert text.text.startswith("There are 7 boxes") and text.logprobs is not None and short.logprobs is not None
    assert text.logprobs.tokens is not None and len(text.logprobs.tokens) == len(prompt) + 1
    found = text.logprobs.token_logprobs
    assert found is not None and found[0] is None and "".join(text.logprobs.tokens) == text.text
    with torch.inference_mode():
        logits = running.llm.launch.model(torch.tensor([prompt])).logits[0]
    expected = torch.log_softmax(logits, -1)[:-1].gather(-1, torch.tensor(prompt[1:]).unsqueeze(-1))[:, 0]
    assert (torch.tensor(found[1:-1]) - expected).abs().max() < 0.05  # int8 activations: chunks of 16 tokens, or all
    assert short.logprobs.token_logprobs is not None
    assert short.logprobs.token_logprobs[1:5] == pytest.approx(found[1:5], abs=5e-3)
    nothing = running.client.completions.create(prompt=prompt, max_tokens=0, **options)
    assert nothing.usage is not None and nothing.usage.completion_tokens == 0
    assert nothing.choices[0].logprobs is not None
    assert nothing.choices[0].logprobs.token_logprobs == found[:-1]
    pieces = list(running.client.completions.create(prompt="A b", max_tokens=2, echo=True, model="demo", stream=True))
    assert "".join(piece.choices[0].text for piece in pieces).startswith("A b")
    for refused in ({"max_tokens": 0}, {"max_tokens": 0, "echo": True}, {"prompt": [[1], []]}):
        assert running.post("/v1/completions", {"model": "demo", "prompt": "A", **refused}).status == 400


def test_halves_of_characters_are_no_text(running: Running) -> None:
    for path, body in (
        ("completions", b'{"model": "\\ud800", "prompt": "a"}'),
        ("completions", b'{"model": "demo", "prompt": "\\ud800"}'),
        ("chat/completions", b'{"model": "demo", "messages": [{"role": "user", "content": "\\udfff"}]}'),
        ("responses", b'{"model": "demo", "input": "\\ud83d"}'),
    ):
        reply = running.post(f"/v1/{path}", body)
        assert reply.status == 400 and "surrogate" in reply.error["message"]


def test_long_prompts_are_refused_before_they_are_encoded(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encoded = running.llm.encoder.tokenizer, []
    encode = type(tokenizer).encode
    monkeypatch.setattr(
        type(tokenizer), "encode", lambda self, text, **more: encoded.append(len(text)) or encode(self, text, **more)
    )
    text = "a b " * 20_000
    for path, body in (
        ("completions", {"prompt": text}),
        ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("responses", {"input": text}),
    ):
        reply = running.post(f"/v1/{path}", {"model": "demo", **body})
        assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
    assert sum(encoded) < len(text)


def test_local_names() -> None:
    for host, local in (
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("evil.com", False),
    ):
        assert is_local(host) is local


def test_an_answer_of_full_length(running: Running) -> None:
    body = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    ended = running.post("/v1/chat/completions", body).json
    full = running.post("/v1/chat/completions", {**body, "ignore_eos": True}).json
    assert ended["choices"][0]["finish_reason"] == "stop" and full["choices"][0]["finish_reason"] == "length"
    assert full["usage"]["completion_tokens"] == 60 > ended["usage"]["completion_tokens"]


def test_a_client_that_leaves_frees_its_slot(running: Running) -> None:
    engine = running.llm.engine
    options: Any = {"model": "demo", "max_tokens": 240, "temperature": 1.0, "logit_bias": {}}
    before = engine.counts().finished["cancelled"]
    stream = running.client.completions.create(prompt="The ", stream=True, **options)
    next(iter(stream))
    stream.close()
    wait_for(lambda: engine.counts().unfinished == 0)
    assert engine.counts().slots_free == 4
    assert engine.counts().finished["cancelled"] >= before


def test_metrics(running: Running) -> None:
    running.llm.chat(MESSAGES, max_tokens=4)
    text = request(running.port, "GET", "/metrics", Authorization=f"Bearer {KEY}").body
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line and not line.startswith("#")
    }
    counts = running.llm.engine.counts()
    assert sum(value for name, value in values.items() if name.startswith("dynaexq_requests_total")) == counts.submitted
    assert values["dynaexq_slots_free"] == 4 and values["dynaexq_running"] == values["dynaexq_waiting"] == 0
    assert values["dynaexq_step_seconds_count"] == counts.steps
    assert 0 < values["dynaexq_ttft_seconds_count"] <= counts.submitted
    assert values["dynaexq_budget_used_bytes"] <= values["dynaexq_budget_bytes"]
    experts = running.llm.launch.runtime.experts.shape
    assert values['dynaexq_resident_experts{layer="0",tier="int4"}'] == experts.experts
    assert values["dynaexq_waits_total"] == 0
