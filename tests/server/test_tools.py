"""Thoughts, tools and streams end to end, with scripted answers in the forms of real models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from dynaexq.engine import Engine
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.server.metrics import Metrics
from support.serving import serve_engine
from support.typed_model import ByteTokenizer, TypedModel

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
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich"}}\n</tool_call>'
SCRIPT = f"<think>\nI must look.\n</think>\n\nOne moment.\n{CALL}"
ASK: Any = {"model": "demo", "messages": [{"role": "user", "content": "Rain?"}], "temperature": 0, "max_tokens": 400}


@contextmanager
def client(script: str, template: str = QWEN, prompt_end: str = "") -> Iterator[tuple[openai.OpenAI, ByteTokenizer]]:
    tokenizer, metrics = ByteTokenizer(template, prompt_end), Metrics()
    engine = Engine(TypedModel(script), lambda _: None, observer=metrics)
    engine.start()
    with serve_engine(engine, PromptEncoder(tokenizer), metrics) as port:
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0), tokenizer
    engine.close()


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


def test_a_template_that_opens_the_thoughts_and_variables() -> None:
    with client("Hm.\n</think>\n\nYes", prompt_end="<think>\n") as (api, tokenizer):
        answer = api.chat.completions.create(extra_body={"chat_template_kwargs": {"enable_thinking": True}}, **ASK)
        message = answer.choices[0].message
        assert message.content == "Yes" and message.reasoning_content == "Hm."  # type: ignore[attr-defined]
        assert tokenizer.asked[-1]["enable_thinking"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "auto"}, "go with tools"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"extra_body": {"chat_template_kwargs": {"tools": True}}}, "cannot set"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "tool_calls": []}]}, "messages"),
        ({"messages": [{"role": "assistant"}]}, "needs content"),
    ],
)
def test_refused(options: Any, message: str) -> None:
    with client("x") as (api, _), pytest.raises(openai.BadRequestError, match=message):
        api.chat.completions.create(**{**ASK, **options})


def test_tools_need_a_template_that_knows_them() -> None:
    with (
        client("x", template="plain") as (api, _),
        pytest.raises(openai.BadRequestError, match="no form of tool calls"),
    ):
        api.chat.completions.create(tools=TOOLS, **ASK)
