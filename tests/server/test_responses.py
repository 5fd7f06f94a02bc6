"""OpenAI's Responses with the official client: on the embedded model, and with scripted thoughts and calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from dynaexq.engine import Engine
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.integrations.transformers.sampling import TransformersWarper
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.llm import LLM
from dynaexq.server.metrics import Metrics
from support.serving import request, serve_app, serve_engine, wait_for
from support.typed_model import ByteTokenizer, TypedModel, make_fast_tokenizer, talk

QWEN = "<tool_call> </think>"
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a place",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": None,
}
THOUGHTS, CALL = "<think>\nI must look.\n</think>", '{"name": "weather", "arguments": {"place": "Zürich"}}'
SCRIPT = f"{THOUGHTS}\n\nOne moment.\n<tool_call>\n{CALL}\n</tool_call>"
ASK: Any = {"model": "demo", "input": "Rain?", "temperature": 0, "max_output_tokens": 400}
PLAIN: Any = {"model": "demo", "input": "reverse: a b c", "temperature": 0, "max_output_tokens": 24}


class Running:
    """A server on the embedded model."""

    def __init__(self, llm: LLM, port: int) -> None:
        self.llm, self.port = llm, port
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    patch, metrics = pytest.MonkeyPatch(), Metrics()
    patch.setenv("DYNAEXQ_CACHE", str(tmp_path_factory.mktemp("cache")))
    with (
        LLM(str(EMBEDDED_MODEL), slots=2, context=256, mode="full", observer=metrics) as llm,
        serve_app(llm, metrics) as port,
    ):
        yield Running(llm, port)
    patch.undo()


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[openai.OpenAI, ByteTokenizer]]:
    tokenizer = ByteTokenizer(QWEN)
    with talk(SCRIPT, tokenizer) as api:
        yield api, tokenizer


def as_sent(value: Any) -> Any:
    """Items without their ids, which are random."""
    if isinstance(value, dict):
        return {key: as_sent(each) for key, each in value.items() if key not in ("id", "call_id")}
    return [as_sent(each) for each in value] if isinstance(value, list) else value


def test_whole_and_streamed_are_what_the_library_says(running: Running) -> None:
    expected = running.llm.chat([{"role": "user", "content": PLAIN["input"]}], max_tokens=24)
    finished = expected.finish.reason.value == "stop"
    whole = running.client.responses.create(**PLAIN, metadata={"run": "7"}, user="me")
    assert whole.output_text == expected.text and whole.object == "response" and whole.error is None
    assert whole.status == ("completed" if finished else "incomplete")
    assert (whole.metadata, whole.user, whole.model, whole.max_output_tokens) == ({"run": "7"}, "me", "demo", 24)
    assert whole.usage is not None and whole.usage.output_tokens == len(expected.tokens)
    assert whole.usage.input_tokens == expected.finish.prompt_tokens
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.usage.output_tokens_details.reasoning_tokens == 0
    assert 0 < whole.usage.input_tokens_details.cached_tokens < whole.usage.input_tokens

    events = list(running.client.responses.create(**PLAIN, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    last: Any = events[-1]
    assert last.response.output_text == expected.text and last.response.usage.total_tokens == whole.usage.total_tokens
    with running.client.responses.stream(**PLAIN) as stream:
        assert [event.type for event in stream] == [event.type for event in events]


def test_instructions_and_items_reach_the_model(running: Running) -> None:
    conversation: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "re"}, {"type": "input_text", "text": "peat: x"}]},
        {"role": "assistant", "content": "x"},
        {"type": "message", "role": "user", "content": "reverse: a b"},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "repeat: x"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "reverse: a b"},
    ]
    answer = running.client.responses.create(**{**PLAIN, "input": conversation}, instructions="Be brief.")
    assert answer.output_text == running.llm.chat(messages, max_tokens=24).text
    assert answer.instructions == "Be brief."


def test_an_answer_that_is_cut_short(running: Running) -> None:
    options = {**PLAIN, "max_output_tokens": 2}
    whole = running.client.responses.create(**options)
    assert whole.status == whole.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert whole.incomplete_details is not None and whole.incomplete_details.reason == "max_output_tokens"
    last = list(running.client.responses.create(**options, stream=True))[-1]
    assert last.type == "response.incomplete" and last.response.output_text == whole.output_text


def test_sampling_options_are_those_of_chats(running: Running) -> None:
    def text(seed: int) -> str:
        options = {**PLAIN, "input": "Well?", "temperature": 2}
        return running.client.responses.create(**options, extra_body={"seed": seed, "top_k": 500}).output_text

    assert text(3) == text(3) and len({text(seed) for seed in range(5)}) > 1


def test_a_raw_stream_names_its_events(running: Running) -> None:
    reply = request(running.port, "POST", "/v1/responses", {**PLAIN, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    for number, block in enumerate(reply.body.strip().split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
    assert event["type"] in ("response.completed", "response.incomplete")


def test_a_client_that_leaves_frees_its_slot(running: Running) -> None:
    engine = running.llm.engine
    options = {**PLAIN, "max_output_tokens": 200, "temperature": 1.5}
    stream = running.client.responses.create(**options, stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    wait_for(lambda: engine.counts().unfinished == 0)
    assert engine.counts().slots_free == 2


def test_thoughts_text_and_calls_are_items(scripted: tuple[openai.OpenAI, ByteTokenizer]) -> None:
    api, tokenizer = scripted
    response = api.responses.create(tools=[TOOL], **ASK)
    reasoning, message, call = response.output
    assert reasoning.type == "reasoning" and reasoning.content and reasoning.content[0].text == "I must look."
    assert message.type == "message" and response.output_text == "One moment."
    assert call.type == "function_call" and call.name == "weather" and json.loads(call.arguments) == {"place": "Zürich"}
    assert response.status == "completed" and {item.status for item in (reasoning, message, call)} == {"completed"}
    assert response.usage is not None and response.usage.output_tokens == len(SCRIPT.encode())
    inside = THOUGHTS.removeprefix("<think")  # the tag's last byte is the first that is known to be of thoughts
    assert response.usage.output_tokens_details.reasoning_tokens == len(inside)
    assert response.tool_choice == "auto" and response.tools[0].to_dict() == TOOL
    described = {key: TOOL[key] for key in ("name", "description", "parameters")}
    assert tokenizer.asked[-1]["tools"] == [{"type": "function", "function": described}]


def test_events_build_the_items(scripted: tuple[openai.OpenAI, ByteTokenizer]) -> None:
    api, _ = scripted
    whole = api.responses.create(tools=[TOOL], **ASK).to_dict()
    events = [event.to_dict() for event in api.responses.create(tools=[TOOL], stream=True, **ASK)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = ("response.reasoning_text.delta", "response.output_text.delta")
    steps = [event["type"].removeprefix("response.") for event in events if event["type"] not in deltas]
    text = ["output_item.added", "content_part.added", "{}.done", "content_part.done", "output_item.done"]
    arguments = "function_call_arguments"
    assert steps == [
        *("created", "in_progress"),
        *(step.format("reasoning_text") for step in text),
        *(step.format("output_text") for step in text),
        *("output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"),
        "completed",
    ]
    for index, item in enumerate(whole["output"]):  # type: ignore[arg-type, var-annotated]
        mine: list[Any] = [event for event in events if event.get("output_index") == index]
        added, done = mine[0]["item"], mine[-1]["item"]
        assert added["status"] == "in_progress" and added["id"] == done["id"] and as_sent(done) == as_sent(item)
        assert all(event.get("item_id", done["id"]) == done["id"] for event in mine)
        said = "".join(event.get("delta", "") for event in mine)
        assert said == (done["arguments"] if item["type"] == "function_call" else done["content"][0]["text"])
    final: Any = events[-1]["response"]
    assert as_sent(final["output"]) == as_sent(whole["output"]) and final["usage"] == whole["usage"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []  # type: ignore


def test_the_client_follows_a_stream(scripted: tuple[openai.OpenAI, ByteTokenizer]) -> None:
    api, _ = scripted
    with api.responses.stream(tools=[TOOL], **ASK) as stream:
        assert any(event.type == "response.function_call_arguments.delta" for event in stream)
        response = stream.get_final_response()
    assert response.output_text == "One moment." and response.output[2].type == "function_call"


def test_a_conversation_goes_back_as_it_came(scripted: tuple[openai.OpenAI, ByteTokenizer]) -> None:
    api, tokenizer = scripted
    first = api.responses.create(tools=[TOOL], **ASK)
    call: Any = first.output[2]
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}
    conversation: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]
    api.responses.create(**{**ASK, "input": [*conversation, *first.output, told, *first.output[:2]]}, tools=[TOOL])
    function = {"name": "weather", "arguments": {"place": "Zürich"}}
    turn = {"role": "assistant", "content": "One moment.", "reasoning_content": "I must look."}
    assert tokenizer.asked[-1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {**turn, "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "content": "wet", "tool_call_id": call.call_id},
        turn,
    ]
    plain = [{"role": "assistant", "content": "One."}, {"role": "assistant", "content": "Two."}]
    api.responses.create(**{**ASK, "input": plain})
    assert tokenizer.asked[-1]["messages"] == plain


@pytest.mark.parametrize("tags", [[], TAGS])
def test_a_forced_call(tags: list[str]) -> None:
    tool = {**TOOL, "parameters": {**TOOL["parameters"], "properties": {"place": {"const": "Bern"}}}}
    with talk("<think>Hm.</think>No.", make_fast_tokenizer(QWEN, "", tags)) as api:
        for choice in ("required", {"type": "function", "name": "weather"}):
            response: Any = api.responses.create(
                tools=[tool], tool_choice=choice, parallel_tool_calls=False, **{**ASK, "max_output_tokens": 150}
            )
            assert response.output[0].content[0].text == "Hm."
            assert response.output[1].type == "function_call" and response.output[1].name == "weather"
            assert response.tool_choice == choice or response.tool_choice.to_dict() == choice
            assert response.parallel_tool_calls is False


class Place(pydantic.BaseModel):
    name: str
    rainy: bool


@pytest.mark.parametrize("tags", [[], TAGS])
def test_thoughts_then_json_whole_and_streamed(tags: list[str]) -> None:
    written = '{"name": "Zürich", "rainy": true}'
    tokenizer = make_fast_tokenizer(QWEN, "", tags)
    with talk(f"{THOUGHTS}\n\n{written}", tokenizer) as api:
        whole = api.responses.parse(text_format=Place, **ASK)
        assert whole.output_parsed == Place(name="Zürich", rainy=True)
        with api.responses.stream(text_format=Place, **ASK) as stream:
            done = [event for event in stream if event.type == "response.output_text.done"]
            final = stream.get_final_response()
        assert done[0].parsed == final.output_parsed == whole.output_parsed
        inside = tokenizer.encode(THOUGHTS if tags else THOUGHTS.removeprefix("<think"))
        assert final.usage is not None and final.usage.output_tokens_details.reasoning_tokens == len(inside)


def test_what_fails_ends_the_stream_with_an_error() -> None:
    class Failing(TypedModel):
        def decode(self, slots: list[int], pasts: list[int], tokens: Any) -> Any:
            if pasts[0] > 10:
                raise RuntimeError("no more")
            return super().decode(slots, pasts, tokens)

    metrics = Metrics()
    engine = Engine(Failing(b"0123456789"), TransformersWarper, observer=metrics)
    engine.start()
    with serve_engine(engine, PromptEncoder(ByteTokenizer(QWEN)), metrics) as port:
        api = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        events: list[Any] = list(api.responses.create(stream=True, **ASK))
        with pytest.raises(openai.InternalServerError):
            api.responses.create(**ASK)
    engine.close()
    error, failed = next(event for event in events if event.type == "error"), events[-1]
    assert error.code == "generation_failed" and "no more" in error.message
    assert failed.type == "response.failed" and failed.response.status == "failed"
    assert failed.response.error.message == error.message and failed.response.output[0].status == "incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"frobnicate": 1}, "frobnicate", "unsupported parameter: frobnicate"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "unsupported parameter: reasoning"),
        ({"include": []}, "include", "unsupported parameter"),
        ({"top_logprobs": 1}, "top_logprobs", "unsupported parameter"),
        ({"n": 2}, "n", "unsupported parameter"),
        ({"stop": "x"}, "stop", "unsupported parameter"),
        ({"store": True}, "store", "keeps no responses"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"background": True}, "background", "should be False"),
        ({"truncation": "auto"}, "truncation", "should be 'disabled'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
        ({"temperature": 3}, "temperature", "less than"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "'developer'"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "an item is a message, reasoning"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
            "'input_text' or 'output_text'",
        ),
        ({"input": [{"type": "reasoning", "content": []}]}, "input.0.content", "at least 1"),
        ({"input": [{"role": "user", "content": "x", "name": "me"}]}, "input.0.name", "unsupported parameter"),
        ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported parameter"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "'json_schema'"),
        ({"text": {"format": {"type": "text"}}, "guided_regex": "a"}, None, "not both"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "should be 'function'"),
        ({"tool_choice": "auto"}, None, "go with tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "time"}}, None, "names 'time'"),
        ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, None, "forces a call"),
        ({"tools": [TOOL]}, "tools", "no form of tool calls"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}}, None, "cannot be enforced"),
        ({"input": "word " * 2000}, None, "room for 256"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    running: Running, change: dict[str, Any], param: str | None, message: str
) -> None:
    reply = request(running.port, "POST", "/v1/responses", {**PLAIN, **change})
    assert reply.status == 400 and message in reply.error["message"], reply.body
    assert reply.error["param"] == param
