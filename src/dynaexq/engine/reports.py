"""Limits of an engine, and what it tells about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dynaexq.core import OptionError
from dynaexq.engine.requests import Finish, FinishEvent


@dataclass(frozen=True)
class EngineOptions:
    """Limits of an engine.

    Args:
        step_tokens: tokens of one step at most, prompts and running sequences together (at least one chunk).
        chunk: tokens of a prompt that are computed at once.
        score_tokens: tokens of a prompt whose own log-probabilities are computed at once, where a request wants them.
        queue: requests that may wait.
        reuse: whether beginnings of prompts are taken from slots that hold them. Their keys and values may come from
            other chunks, so answers can differ in the last bits.
    """

    step_tokens: int = 128
    chunk: int = 128
    score_tokens: int = 16
    queue: int = 256
    reuse: bool = True

    def check(self) -> None:
        """Raise OptionError for values out of range."""
        for name in ("step_tokens", "chunk", "score_tokens", "queue"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class StepReport:
    """One step: seconds in all, seconds of them in the model, and tokens."""

    seconds: float
    model_seconds: float
    prompt_tokens: int
    decoded_tokens: int


class Observer(Protocol):
    """Hears of every step and every end, on the engine's thread."""

    def on_step(self, report: StepReport) -> None:
        """A step is done."""

    def on_finish(self, event: FinishEvent) -> None:
        """A sequence has ended."""


@dataclass
class EngineCounts:
    """A moment's view: what waits and runs, and totals since the start."""

    waiting: int = 0
    running: int = 0
    slots_free: int = 0
    steps: int = 0
    submitted: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in Finish})

    @property
    def unfinished(self) -> int:
        """Requests that were taken and have not ended."""
        return self.submitted - sum(self.finished.values())
