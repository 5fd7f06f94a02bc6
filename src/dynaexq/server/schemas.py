"""Bodies of requests. A parameter that is not here is refused by name: nothing is ignored in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from dynaexq.engine import Sampling
from dynaexq.engine.requests import MAX_STOPS, MAX_TOP_LOGPROBS
from dynaexq.integrations.grammar import ANY_OBJECT, Grammars, MatcherConstraint

MAX_CHOICES = 16
MAX_MESSAGES = 1024
MAX_BIASES = 300
MAX_TOOLS = 128

RESERVED = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "messages",
    "return_dict",
    "tokenize",
    "tools",
}
"""Variables of templates that the server sets."""

StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Body(BaseModel):
    """Strict about names."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    """What a stream ends with."""

    include_usage: bool = False


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
        """Templates want arguments as an object."""
        try:
            arguments: Any = json.loads(self.function.arguments)
        except ValueError:
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


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
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.as_template() for call in self.tool_calls]
        return message


class FunctionTool(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool."""

    type: Literal["function"]
    function: FunctionTool


class TextFormat(Body):
    """No grammar."""

    type: Literal["text"]


class JsonFormat(Body):
    """Some JSON object."""

    type: Literal["json_object"]


class NamedSchema(Body):
    """A JSON schema, always enforced."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class SchemaFormat(Body):
    """JSON of one schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class SamplingBody(Body):
    """What chat and plain completions share. `top_k`, `min_p`, `repetition_penalty` and `priority` are ours."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] = {}
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    user: str | None = None
    response_format: ResponseFormat | None = None
    guided_regex: str | None = None

    @model_validator(mode="after")
    def check_grammar(self) -> SamplingBody:
        """One grammar at most."""
        if self.guided_regex is not None and self.response_format is not None:
            raise ValueError("give response_format or guided_regex, not both")
        return self

    @model_validator(mode="after")
    def check_stream(self) -> SamplingBody:
        """Stream options without a stream would do nothing."""
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options go with stream: true")
        return self

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    def constraint(self, grammars: Callable[[], Grammars]) -> MatcherConstraint | None:
        """A new one for each choice. Raises OptionError for a grammar that cannot be enforced."""
        if self.guided_regex is not None:
            return grammars().regex(self.guided_regex)
        if isinstance(self.response_format, JsonFormat):
            return grammars().json_schema(ANY_OBJECT)
        if isinstance(self.response_format, SchemaFormat):
            return grammars().json_schema(self.response_format.json_schema.schema_)
        return None

    def sampling(self, choice: int, logprobs: int | None) -> Sampling:
        """Of choice number `choice`: with a seed, each has its own."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
            repetition=self.repetition_penalty,
            bias=self.logit_bias,
            seed=None if self.seed is None else (self.seed + choice) % (1 << 63),
            logprobs=logprobs,
        )


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: dict[Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,64}$")], bool | int | str] = {}

    @model_validator(mode="after")
    def check_options(self) -> ChatBody:
        """Refuse options that conflict or would do nothing."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_completion_tokens or max_tokens, not both")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
        if (self.tool_choice or self.parallel_tool_calls) and not self.tools:
            raise ValueError("tool_choice and parallel_tool_calls go with tools")
        if RESERVED & self.chat_template_kwargs.keys():
            raise ValueError(f"chat_template_kwargs cannot set {', '.join(sorted(RESERVED))}")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens of an answer at most."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """Alternatives to report beside each token; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | Annotated[list[int], Field(min_length=1)] | Annotated[list[str], Field(min_length=1, max_length=64)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: Literal[False] = False
    best_of: Literal[1] = 1
    suffix: None = None
