"""The body of POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dynaexq.engine.requests import MAX_TOP_LOGPROBS
from dynaexq.server.schemas import Body, ChoicesBody
from dynaexq.server.tools import MAX_TOOLS, ConversationBody, Function, FunctionChoice

MAX_MESSAGES = 1024


class TextPart(Body):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """A function and its arguments, as JSON text."""

    name: str
    arguments: str


class MadeCall(Body):
    """A call that the model made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template(self) -> dict[str, Any]:
        """The form that chat templates take."""
        return call_as_template(self.id, self.function.name, self.function.arguments)


class ChatMessage(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    tool_calls: Annotated[list[MadeCall], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check_role(self) -> ChatMessage:
        """What belongs to which role."""
        if self.content is None and self.tool_calls is None:
            raise ValueError("a message needs content")
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError("tool_calls and reasoning_content belong to the assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id and the role 'tool' go together")
        return self

    def as_template(self) -> dict[str, Any]:
        """The form that chat templates take."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        message: dict[str, Any] = {"role": template_role(self.role), "content": text}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.as_template() for call in self.tool_calls]
        return message


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class ToolChoice(Body):
    """A tool that must be called."""

    type: Literal["function"]
    function: FunctionChoice


class ChatBody(ChoicesBody, ConversationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None

    @model_validator(mode="after")
    def check_options(self) -> ChatBody:
        """Refuse options that conflict or would do nothing."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_completion_tokens or max_tokens, not both")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        return self

    @property
    def functions(self) -> Sequence[Function]:
        """What may be called."""
        return [tool.function for tool in self.tools or []]

    @property
    def choice(self) -> Literal["auto", "none", "required"] | FunctionChoice | None:
        """Whether something must be called."""
        return self.tool_choice.function if isinstance(self.tool_choice, ToolChoice) else self.tool_choice

    @property
    def limit(self) -> int | None:
        """Tokens of an answer at most."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report beside each token; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None


def template_role(role: str) -> str:
    """Templates know no developers."""
    return "system" if role == "developer" else role


def call_as_template(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Templates want arguments as an object."""
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": value}}
