"""A conversation on its way to the model: its prompt, what its answer must be, and how that is read."""

from __future__ import annotations

from typing import Any, NamedTuple

from dynaexq.engine import Constraint
from dynaexq.integrations.grammar import Calls, Thoughts
from dynaexq.server.answers import Wish
from dynaexq.server.errors import ApiError
from dynaexq.server.parsing import THINK, Conventions, OutputParser
from dynaexq.server.service import Service
from dynaexq.server.tools import ConversationBody

PROMPT_END_TOKENS = 8
"""Enough to see whether a template has opened the model's thoughts."""


class Conversation(NamedTuple):
    """What to submit, and what it takes to read the answers."""

    wishes: list[Wish]
    conventions: Conventions
    prompt_end: str
    offers_tools: bool

    def make_parser(self) -> OutputParser:
        """For one answer."""
        return self.conventions.parser(self.prompt_end, self.offers_tools)


def prepare(
    service: Service,
    body: ConversationBody,
    messages: list[dict[str, Any]],
    limit: int | None,
    logprobs: int | None = None,
) -> Conversation:
    """Render messages and make the body's wishes. Raises ApiError, or what encoder and grammars raise."""
    encoder, conventions = service.encoder, service.conventions
    offers = bool(body.functions) and body.choice != "none"
    if offers and conventions.call is None:
        raise ApiError(400, "the model's chat template has no form of tool calls that this server reads", "tools")
    tools = [function.as_template() for function in body.functions] if offers else None
    texts = [str(part) for message in messages for part in message.values()] + [str(tool) for tool in tools or []]
    with service.encoding:
        encoder.check_length(texts, service.engine.model.room)
        prompt = encoder.encode_chat(messages, tools, **body.chat_template_kwargs)
    prompt_end = encoder.decode_all(list(prompt[-PROMPT_END_TOKENS:]))
    calls = _calls(body, conventions) if offers else None
    thoughts = _thoughts(conventions, prompt_end)

    def start_grammar() -> Constraint | None:
        return None if body.form is None and calls is None else service.grammars.start(body.form, calls, thoughts)

    wishes = service.make_wishes(body, [prompt], limit, logprobs, start_grammar)
    return Conversation(wishes, conventions, prompt_end, offers)


def _calls(body: ConversationBody, conventions: Conventions) -> Calls | None:
    """The grammar of calls, where calls that are merely possible are not enough."""
    one = body.parallel_tool_calls is False or not isinstance(body.choice, str | None)
    strict = any(function.strict for function in body.functions)
    if conventions.call is None or not (body.forces_call or one or strict or body.form is not None):
        return None
    tag, functions = conventions.call, {each.name: each.arguments for each in body.callable_functions}
    return Calls(tag.opening, tag.closing, functions, body.forces_call, not one)


def _thoughts(conventions: Conventions, prompt_end: str) -> Thoughts | None:
    if not conventions.thinks_first(prompt_end):
        return None
    return Thoughts(THINK.opening, str(THINK.closing), conventions.has_begun(prompt_end))
