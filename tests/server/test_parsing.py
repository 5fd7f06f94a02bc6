"""Thoughts and tool calls in the forms that real templates teach, cut into pieces anywhere."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.server.parsing import HERMES_CALL, MISTRAL_CALLS, THINK, Conventions, OutputParser, Parsed, Tag

QWEN = "{%- if tools %}...<tool_call>\n{...}\n</tool_call>...{% endif %}{{ '</think>' }}"
MISTRAL = "{{ '[TOOL_CALLS] [' }}"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


def run(parser: OutputParser, pieces: list[str]) -> Parsed:
    whole = Parsed()
    for parsed in [*(parser.add(piece) for piece in pieces), parser.finish()]:
        whole.content += parsed.content
        whole.reasoning += parsed.reasoning
        whole.calls += parsed.calls
    return whole


def cut(text: str, places: list[int]) -> list[str]:
    marks = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(marks)]


PLACES = st.lists(st.integers(0, 400), max_size=40)
HERMES = (
    "<think>\nThe user wants the weather.\n</think>\n\nLet me look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Zürich", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)


@given(PLACES)
def test_thoughts_and_calls_of_qwen(places: list[int]) -> None:
    parsed = run(Conventions.of(QWEN).parser("<|im_start|>assistant\n", tools=True), cut(HERMES, places))
    assert parsed.reasoning == "The user wants the weather."
    assert parsed.content == "Let me look."
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [
        ("weather", {"place": "Zürich", "days": 2}),
        ("time", {}),
    ]
    assert len({call.id for call in parsed.calls}) == 2


@given(PLACES)
def test_calls_of_mistral_run_to_the_end(places: list[int]) -> None:
    text = 'Sure.[TOOL_CALLS] [{"name": "f", "arguments": {"x": [1, "]"]}}, {"name": "g", "arguments": {}}]'
    parsed = run(Conventions.of(MISTRAL).parser("", tools=True), cut(text, places))
    assert parsed.content == "Sure." and [call.name for call in parsed.calls] == ["f", "g"]


@given(PLACES)
def test_a_template_that_opens_the_thoughts(places: list[int]) -> None:
    parser = Conventions.of(QWEN).parser("<|im_start|>assistant\n<think>\n", tools=False)
    parsed = run(parser, cut("I see.\n</think>\n\nYes <tool_call>{}</tool_call>", places))
    assert (parsed.reasoning, parsed.content, parsed.calls) == ("I see.", "Yes <tool_call>{}</tool_call>", [])


@pytest.mark.parametrize(
    "inner",
    ["", "not json", '{"arguments": {}}', '{"name": 3, "arguments": {}}', '{"name": "f", "arguments": 3}', "[]", "[1]"],
)
def test_what_is_no_call_stays_text(inner: str) -> None:
    parser = OutputParser([HERMES_CALL])
    parsed = run(parser, [f"a <tool_call>{inner}</tool_call> b"])
    assert parsed.content == f"a <tool_call>{inner}</tool_call> b"
    assert not parsed.calls and not parser.called


def test_a_call_that_is_cut_short_is_text_or_a_call() -> None:
    cut_short = run(OutputParser([HERMES_CALL]), ['<tool_call>{"name": "f", "arg'])
    assert cut_short.calls == [] and cut_short.content.startswith('<tool_call>{"name": "f", "arg')
    whole = run(OutputParser([HERMES_CALL]), ['<tool_call>{"name": "f", "arguments": {}}'])
    assert [call.name for call in whole.calls] == ["f"]


@given(st.lists(st.text("<>/thinkool_ca[]TCALS ab\n", max_size=8), max_size=30), PLACES)
def test_nothing_but_space_is_lost(words: list[str], places: list[int]) -> None:
    text = "".join(words)
    for tags in ([], [THINK], [HERMES_CALL, THINK], [MISTRAL_CALLS]):
        once, pieces = run(OutputParser(list(tags)), [text]), run(OutputParser(list(tags)), cut(text, places))
        assert (once.content, once.reasoning) == (pieces.content, pieces.reasoning)
        if not tags:
            assert once.content == text


def test_conventions_are_read_off_templates() -> None:
    assert Conventions.of(PLAIN) == Conventions(False, None) == Conventions.of(None)
    assert Conventions.of(QWEN) == Conventions(True, HERMES_CALL)
    assert Conventions.of(MISTRAL).call is MISTRAL_CALLS
    assert Conventions.of(QWEN).thinks_first("<|im_start|>assistant\n")
    assert not Conventions.of(QWEN).thinks_first("<think>\n\n</think>\n\n")
    assert isinstance(THINK, Tag)
