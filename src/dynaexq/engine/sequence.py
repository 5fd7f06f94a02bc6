"""A sequence in a slot."""

from __future__ import annotations

from dataclasses import dataclass

from dynaexq.core import DynaExqError
from dynaexq.engine.requests import Finish, FinishEvent, Request
from dynaexq.engine.sampler import Sampler
from dynaexq.engine.slots import Slot


@dataclass(frozen=True)
class SequenceView:
    """A running sequence for onlookers: tokens of its prompt, computed of them, generated, and at most; seconds since
    its submission."""

    number: int
    state: str
    prompt: int
    done: int
    generated: int
    most: int
    seconds: float


@dataclass(eq=False)
class Sequence:
    """`done` tokens of the prompt are computed, `reused` of them taken over; `next` is the token to append next, None
    while the prompt is not done. Times are the engine's clock."""

    request: Request
    slot: Slot
    sampler: Sampler
    submitted: float
    started: float
    done: int
    reused: int
    generated: int = 0
    first: float | None = None
    next: int | None = None

    def view(self, now: float) -> SequenceView:
        """How far it is."""
        request, state = self.request, "prefill" if self.next is None else "decode"
        counts = len(request.prompt), self.done, self.generated, request.max_tokens
        return SequenceView(request.number, state, *counts, now - self.submitted)

    def finish(self, reason: Finish, now: float, error: Exception | None = None) -> FinishEvent:
        """What its end is reported as."""
        return FinishEvent(
            reason=reason,
            prompt_tokens=len(self.request.prompt),
            generated_tokens=self.generated,
            reused_tokens=self.reused,
            queue_seconds=self.started - self.submitted,
            ttft_seconds=None if self.first is None else self.first - self.submitted,
            seconds=now - self.submitted,
            error=None if error is None else describe(error),
            cause=error if isinstance(error, DynaExqError) else None,
        )


def finish_waiting(request: Request, reason: Finish, waited: float) -> FinishEvent:
    """The end of a request that never got a slot."""
    return FinishEvent(reason, len(request.prompt), 0, 0, waited, None, waited)


def describe(error: Exception) -> str:
    """For people: what nobody foresaw with its kind."""
    return str(error) if isinstance(error, DynaExqError) else f"{type(error).__name__}: {error}"
