"""Bodies of requests. A parameter that is not here is refused by name: nothing is ignored in silence."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from dynaexq.engine import Sampling
from dynaexq.engine.requests import MAX_STOPS, MAX_TOP_LOGPROBS

MAX_CHOICES = 16
MAX_MESSAGES = 1024
MAX_BIASES = 300

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


class ChatMessage(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)]
    name: str | None = None

    def as_template(self) -> dict[str, Any]:
        """The form that chat templates take."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text, **({"name": self.name} if self.name else {})}


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

    @model_validator(mode="after")
    def check_options(self) -> ChatBody:
        """Refuse options that conflict or would do nothing."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("give max_completion_tokens or max_tokens, not both")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true")
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
