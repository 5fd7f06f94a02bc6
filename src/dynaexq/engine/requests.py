"""What the engine is asked for, and what it answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from dynaexq.core import DynaExqError, OptionError

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16


class RefusedError(DynaExqError):
    """A request that the engine will not take: it can never fit, or too many wait."""


class TooLongError(RefusedError):
    """Prompt and answer together do not fit a sequence's room."""


class QueueFullError(RefusedError):
    """Too many requests wait already."""


class EngineClosedError(RefusedError):
    """The engine takes no more requests."""


class Finish(Enum):
    """Why a sequence ended; values as OpenAI names them, and two of our own."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedy at temperature 0. Names and ranges as in OpenAI's interface and Transformers'.

    Args:
        top_k: 0 is off; top_p: 1 is off; min_p: 0 is off.
        presence, frequency: taken off a token's logit once, or for every time it was generated.
        repetition: Transformers' factor on logits of tokens seen, in prompt or answer; 1 is off.
        bias: added to logits, by token.
        logprobs: how many alternatives to report beside each token's own; None reports nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None

    def check(self, vocabulary: int) -> None:
        """Raise OptionError for values out of range, or that would do nothing."""
        ranges = {
            "temperature": (self.temperature, 0.0, 10.0),
            "top_p": (self.top_p, 0.0, 1.0),
            "min_p": (self.min_p, 0.0, 1.0),
            "top_k": (self.top_k, 0, vocabulary),
            "presence_penalty": (self.presence, -2.0, 2.0),
            "frequency_penalty": (self.frequency, -2.0, 2.0),
            "repetition_penalty": (self.repetition, 0.01, 10.0),
            "logprobs": (self.logprobs or 0, 0, MAX_TOP_LOGPROBS),
        }
        for name, (value, low, high) in ranges.items():
            if not low <= value <= high:  # NaN too
                raise OptionError(f"{name} is {value}; it goes from {low} to {high}")
        if self.top_p == 0:
            raise OptionError("top_p is 0; it must be above")
        for token, value in self.bias.items():
            if not 0 <= token < vocabulary:
                raise OptionError(f"logit_bias names token {token}; the vocabulary has {vocabulary}")
            if not -100 <= value <= 100:
                raise OptionError(f"logit_bias of token {token} is {value}; it goes from -100 to 100")

    @property
    def greedy(self) -> bool:
        """Whether the next token is the largest of the model's own logits, and nothing else is asked for."""
        plain = self.presence == self.frequency == 0 and self.repetition == 1 and not self.bias
        return self.temperature == 0 and plain and self.logprobs is None


class Alternative(NamedTuple):
    """A token and its log-probability under the model, before sampling options."""

    token: int
    logprob: float


@dataclass(frozen=True)
class TokenEvent:
    """One generated token; `alternatives` where logprobs were asked for, the most likely first."""

    token: int
    logprob: float | None = None
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class ScoredEvent:
    """Prompt tokens with their log-probabilities, in order; the first of a text has none."""

    tokens: tuple[TokenEvent, ...]


@dataclass(frozen=True)
class FinishEvent:
    """The end of a sequence. Seconds count from the submission; `ttft_seconds` is None if no token came.

    `reused_tokens` of the prompt came from a slot that held them already. `cause` is the error, where it is one that a
    user can do something about.
    """

    reason: Finish
    prompt_tokens: int
    generated_tokens: int
    reused_tokens: int
    queue_seconds: float
    ttft_seconds: float | None
    seconds: float
    error: str | None = None
    cause: DynaExqError | None = None

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time between tokens after the first; None with fewer than two."""
        if self.ttft_seconds is None or self.generated_tokens < 2:
            return None
        return (self.seconds - self.ttft_seconds) / (self.generated_tokens - 1)


Event = TokenEvent | ScoredEvent | FinishEvent
Listener = Callable[[Event], None]
"""Called on the engine's thread: it must return at once. If it raises, the request is cancelled."""


class Constraint(Protocol):
    """A grammar that an answer must follow; one object for each request."""

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [vocabulary] with every token that cannot come next at minus infinity."""

    def accept(self, token: int) -> None:
        """Token `token` was chosen."""

    @property
    def complete(self) -> bool:
        """Whether nothing may follow."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the prompt's tokens from place `start` on, with so many alternatives each."""

    alternatives: int = 0
    start: int = 0


_numbers = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Request:
    """One sequence to generate: prompt token ids, how many to add at most, and who hears of it.

    `stop_tokens` end the sequence; they are not reported. Higher `priority` goes first, then who came first. `scores`
    asks for the log-probabilities of prompt tokens too; with it, `max_tokens` may be 0.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    listener: Listener
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    priority: int = 0
    constraint: Constraint | None = None
    scores: Scores | None = None
    number: int = field(default_factory=lambda: next(_numbers))
