"""Thoughts, tools and streams end to end, with scripted answers in the forms of real models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from support.typed_model import ByteTokenizer, make_fast_tokenizer, talk

QWEN = "<tool_call> </think>"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]


def function(name: str, parameters: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich"}}\n</tool_call>'
SCRIPT = f"<think>\nI must look.\n</think>\n\nOne moment.\n{CALL}"
ASK: Any = {"model": "demo", "messages": [{"role": "user", "content": "Rain?"}], "temperature": 0, "max_tokens": 400}


@contextmanager
def client(script: str, template: str = QWEN, prompt_end: str = "") -> Iterator[tuple[openai.OpenAI, ByteTokenizer]]:
    tokenizer = ByteTokenizer(template, prompt_end)
    with talk(script, tokenizer) as api:
        yield api, tokenizer


def test_a_call_with_thoughts_whole_and_streamed() -> None:
    with client(SCRIPT) as (api, tokenizer):
        whole = api.chat.completions.create(tools=TOOLS, **ASK).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content == "One moment."
        assert whole.message.reasoning_content == "I must look."  # type: ignore[attr-defined]
        assert whole.message.tool_calls is not None
        call = whole.message.tool_calls[0]
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"place": "Zürich"}
        assert tokenizer.asked[-1]["tools"] == TOOLS

        content = reasoning = arguments = ""
        finish = None
        for chunk in api.chat.completions.create(tools=TOOLS, stream=True, **ASK):
            choice = chunk.choices[0]
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or []:
                assert part.index == 0 and part.function is not None
                arguments += part.function.arguments or ""
            finish = choice.finish_reason or finish
        assert (content, reasoning, finish) == ("One moment.", "I must look.", "tool_calls")
        assert json.loads(arguments) == {"place": "Zürich"}


def test_the_answer_of_a_tool_goes_back() -> None:
    with client("It rains.") as (api, tokenizer):
        call: Any = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Z"}'}}
        messages: Any = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Ra"}, {"type": "text", "text": "in?"}]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "wet"},
        ]
        answer = api.chat.completions.create(tools=TOOLS, **{**ASK, "messages": messages}).choices[0]
        assert answer.message.content == "It rains." and answer.finish_reason == "stop"
        given = tokenizer.asked[-1]["messages"]
        assert given[0]["role"] == "system" and given[1]["content"] == "Rain?"
        assert given[2]["tool_calls"][0]["function"]["arguments"] == {"place": "Z"}
        assert given[3] == {"role": "tool", "content": "wet", "tool_call_id": "call_1"}


def test_without_tools_a_call_is_text() -> None:
    with client(CALL) as (api, tokenizer):
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = api.chat.completions.create(**options, **ASK).choices[0]  # type: ignore[call-overload]
            assert answer.message.content == CALL and answer.finish_reason == "stop"
            assert tokenizer.asked[-1]["tools"] is None


def test_a_call_that_is_cut_short_is_text() -> None:
    for script in (CALL[:-20], "<tool_call>"):
        with client(script) as (api, _):
            answer = api.chat.completions.create(tools=TOOLS, **ASK).choices[0]
            assert (answer.message.content, answer.message.tool_calls) == (script, None)


def test_a_template_that_opens_the_thoughts_and_variables() -> None:
    with client("Hm.\n</think>\n\nYes", prompt_end="<think>\n") as (api, tokenizer):
        answer = api.chat.completions.create(extra_body={"chat_template_kwargs": {"enable_thinking": True}}, **ASK)
        message = answer.choices[0].message
        assert message.content == "Yes" and message.reasoning_content == "Hm."  # type: ignore[attr-defined]
        assert tokenizer.asked[-1]["enable_thinking"] is True


@pytest.fixture(scope="module")
def anyone() -> Iterator[openai.OpenAI]:
    with client("x") as (api, _):
        yield api


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "auto"}, "go with tools"),
        ({"parallel_tool_calls": False}, "go with tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice: Input should be 'auto', 'none' or 'required'"),
        ({"tools": TOOLS, "tool_choice": named("time")}, "names 'time', which is none of the tools"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "no format"),
        ({"tools": TOOLS, "tool_choice": named("weather"), "extra_body": {"guided_regex": "a"}}, "no guided_regex"),
        ({"tools": TOOLS * 2}, "two tools have the same name"),
        ({"tools": [function("f", {"type": "string"})]}, "tools.0.function.parameters: .* schema of an object"),
        ({"tools": [function("f", {"type": 3}, strict=True)]}, "schema of an object"),
        ({"tools": TOOLS, "tool_choice": "required"}, "no grammar can be enforced with the model's tokenizer"),
        ({"extra_body": {"chat_template_kwargs": {"tools": True}}}, "cannot set"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "tool_calls": []}]}, "messages"),
        ({"messages": [{"role": "assistant"}]}, "needs content"),
    ],
)
def test_refused(anyone: openai.OpenAI, options: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        anyone.chat.completions.create(**{**ASK, **options})


def test_tools_need_a_template_that_knows_them() -> None:
    with (
        client("x", template="plain") as (api, _),
        pytest.raises(openai.BadRequestError, match="no form of tool calls"),
    ):
        api.chat.completions.create(tools=TOOLS, **ASK)


PLACES: Any = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"Place": {"enum": ["Bern", "Zürich"]}},
}
BOTH: Any = [function("weather", PLACES), function("time", None)]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]"]
KINDS = {"text": ([], False), "tokens": (TAGS, False), "special tokens": (TAGS, True)}
HERMES, MISTRAL = "<tool_call> </think>", "[TOOL_CALLS] </think>"


def write(template: str, *calls: tuple[str, str]) -> str:
    made = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    if template == MISTRAL:
        return f"[TOOL_CALLS] [{', '.join(made)}]"
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in made)


def calls_of(choice: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]


WEATHER, TIME = ("weather", '{"place": "Zürich"}'), ("time", "{}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["<tool_call>", "[TOOL_CALLS]"])
def test_a_call_is_forced(template: str, kind: str) -> None:
    tokenizer = make_fast_tokenizer(template, "", *KINDS[kind])
    with talk("No, I will not call anything.", tokenizer) as api:
        for choice, name in ((named("time"), "time"), (named("weather"), "weather"), ("required", None)):
            options: Any = {"tools": BOTH, "tool_choice": choice, "parallel_tool_calls": False}
            answer = api.chat.completions.create(**options, **ASK).choices[0]
            (call,) = calls_of(answer)
            assert call in [("time", {}), ("weather", {"place": "Bern"}), ("weather", {"place": "Zürich"})]
            assert name in (None, call[0])
            assert answer.finish_reason == "tool_calls" and answer.message.content is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [HERMES, MISTRAL])
def test_calls_that_the_model_makes_by_itself_are_let_through_after_its_thoughts(template: str, kind: str) -> None:
    tokenizer = make_fast_tokenizer(template, "", *KINDS[kind])
    with talk(f"<think>\nWhat <now> {{?\n</think>\n\n{write(template, WEATHER, TIME)}", tokenizer) as api:
        both, one = [("weather", {"place": "Zürich"}), ("time", {})], [("weather", {"place": "Zürich"})]
        for options, expected in (
            ({}, both),
            ({"tool_choice": "required"}, both),
            ({"tool_choice": "required", "parallel_tool_calls": False}, one),
            ({"tool_choice": named("weather")}, one),
            ({"parallel_tool_calls": False}, one),
            ({"response_format": {"type": "json_object"}}, both),
        ):
            answer = api.chat.completions.create(tools=BOTH, **options, **ASK).choices[0]  # type: ignore[call-overload]
            assert calls_of(answer) == expected, options
            assert answer.message.reasoning_content == "What <now> {?" and answer.message.content is None


@pytest.mark.parametrize("kind", KINDS)
def test_thoughts_that_the_prompt_has_opened_come_before_a_forced_call(kind: str) -> None:
    tokenizer = make_fast_tokenizer(HERMES, "<think>\n", *KINDS[kind])
    with talk("Hm.\n</think>\n\nNo.", tokenizer) as api:
        answer = api.chat.completions.create(tools=BOTH, tool_choice=named("time"), **ASK)
        assert calls_of(answer.choices[0]) == [("time", {})]
        assert answer.choices[0].message.reasoning_content == "Hm."  # type: ignore[attr-defined]
        details = answer.usage.completion_tokens_details  # type: ignore[union-attr]
        assert details.reasoning_tokens == len(tokenizer.encode("Hm.\n</think>"))  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [HERMES, MISTRAL])
def test_strict_arguments_follow_their_schema_and_text_stays_free(template: str, kind: str) -> None:
    tools = [function("weather", PLACES, strict=True)]
    rome = ("weather", '{"place": "Rome"}')
    script = f"I look <it> up.\n{write(template, rome)}"
    tokenizer = make_fast_tokenizer(template, "", *KINDS[kind])
    with talk(script, tokenizer) as api:
        loose = api.chat.completions.create(tools=BOTH, **ASK).choices[0]
        assert calls_of(loose) == [("weather", {"place": "Rome"})]
        strict = api.chat.completions.create(tools=tools, **ASK).choices[0]  # type: ignore[arg-type]
        ((name, arguments),) = calls_of(strict)
        assert name == "weather" and arguments["place"] in ("Bern", "Zürich")
        assert loose.message.content == strict.message.content == "I look <it> up."
        tools = [function("weather", {"type": "object", "properties": 3}, strict=True)]
        with pytest.raises(openai.BadRequestError, match="cannot be enforced"):
            api.chat.completions.create(tools=tools, **ASK)  # type: ignore[arg-type]


def test_a_format_holds_where_no_call_is_made() -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": {"a": 1}}}}
    tokenizer = make_fast_tokenizer(HERMES, "", TAGS)
    for script in ('<think>Hm.</think>{"a": 1}', "<think>Hm.</think>No.", "No."):
        with talk(script, tokenizer) as api:
            answer = api.chat.completions.create(tools=BOTH, response_format=form, **ASK).choices[0]
            assert json.loads(answer.message.content or "") == {"a": 1} and answer.finish_reason == "stop"
