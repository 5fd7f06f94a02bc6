"""Bodies of requests. A parameter that is not here is refused by name: nothing is ignored in silence."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from dynaexq.engine import Sampling, Scores
from dynaexq.engine.requests import MAX_STOPS
from dynaexq.integrations.grammar import ANY_OBJECT, Form

MAX_CHOICES = 16
MAX_BIASES = 300
MAX_PROMPTS = 64

StopText = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Body(BaseModel):
    """Strict about names."""

    model_config = ConfigDict(extra="forbid")


class WholeBody(Body):
    """The body of a request."""

    @model_validator(mode="before")
    @classmethod
    def check_text(cls, data: Any) -> Any:
        """JSON can hold halves of surrogate pairs, which are no text."""
        if not isinstance(data, dict):
            return data  # refused right after
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("half of a surrogate pair, which is no text") from error
        return data


class AnswerFormat(Body):
    """What an answer must be."""

    @property
    def form(self) -> Form | None:
        """None is text."""
        return None


class TextFormat(AnswerFormat):
    """No grammar."""

    type: Literal["text"]


class JsonFormat(AnswerFormat):
    """Some JSON object."""

    type: Literal["json_object"]

    @property
    def form(self) -> Form:
        """Any."""
        return ANY_OBJECT


class NamedSchema(Body):
    """A JSON schema, always enforced."""

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class SchemaFormat(AnswerFormat):
    """JSON of one schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def form(self) -> Form:
        """The schema."""
        return self.json_schema.schema_


class SamplingBody(WholeBody):
    """What all endpoints share. `top_k`, `min_p`, `repetition_penalty`, `priority`, `guided_regex` and `ignore_eos` (an
    answer of full length) are ours."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] = {}
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    stream: bool = False
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    user: str | None = None
    guided_regex: str | None = None
    ignore_eos: bool = False

    @model_validator(mode="after")
    def check_grammar(self) -> SamplingBody:
        """One grammar at most."""
        if self.guided_regex is not None and self.format is not None:
            raise ValueError("give a format of the answer or guided_regex, not both")
        return self

    @property
    def format(self) -> AnswerFormat | None:
        """Where an endpoint has one."""
        return None

    @property
    def form(self) -> Form | None:
        """What an answer must be; None is anything."""
        return self.guided_regex if self.format is None else self.format.form

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return 1

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return []

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


class StreamOptions(Body):
    """What a stream ends with."""

    include_usage: bool = False


class ChoicesBody(SamplingBody):
    """What chat and plain completions share."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stream_options: StreamOptions | None = None
    response_format: Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")] | None = None

    @model_validator(mode="after")
    def check_stream(self) -> ChoicesBody:
        """Stream options without a stream would do nothing."""
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options go with stream: true")
        return self

    @property
    def format(self) -> AnswerFormat | None:
        """Of every choice."""
        return self.response_format

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1)]


class CompletionBody(ChoicesBody):
    """POST /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool = False
    best_of: Literal[1] = 1
    suffix: None = None

    @model_validator(mode="after")
    def check_echo(self) -> CompletionBody:
        """An answer of nothing is one to the question of the prompt's own log-probabilities."""
        if self.max_tokens == 0 and not (self.echo and self.logprobs is not None):
            raise ValueError("max_tokens may be 0 with echo and logprobs only")
        return self

    @property
    def scores(self) -> Scores | None:
        """Whether the prompt's tokens get log-probabilities."""
        return Scores(self.logprobs) if self.echo and self.logprobs is not None else None
