"""Answers on their way from the engine's thread to a client: pieces of several choices in one row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from dynaexq.engine import (
    Constraint,
    Engine,
    Event,
    Finish,
    FinishEvent,
    Request,
    Sampling,
    ScoredEvent,
    Scores,
    TokenEvent,
)
from dynaexq.engine.requests import Listener
from dynaexq.engine.text import AnswerText, Decode
from dynaexq.server.errors import ApiError


@dataclass(frozen=True)
class Wish:
    """One choice to generate."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    stop_tokens: frozenset[int]
    priority: int
    constraint: Constraint | None = None
    scores: Scores | None = None


@dataclass(frozen=True)
class Piece:
    """What is new of choice `index`: text, the tokens behind it, and at the end why it ended."""

    index: int
    text: str
    tokens: tuple[TokenEvent, ...] = ()
    finish: str | None = None


@dataclass
class Usage:
    """Tokens of a whole request; a prompt counts once, however many choices it has."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


@dataclass
class _Choice:
    request: Request
    text: AnswerText
    done: bool = False
    held: list[TokenEvent] = field(default_factory=list)


class Answers:
    """The choices of one request. Iterate once; `cancel` whatever happens in between."""

    def __init__(self, engine: Engine, decode: Decode, wishes: list[Wish]) -> None:
        """Submit all wishes, or none. Raises what `Engine.submit` raises."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._choices: list[_Choice] = []
        self.usage = Usage(prompt=sum(len(prompt) for prompt in {wish.prompt for wish in wishes}))
        try:
            for index, wish in enumerate(wishes):
                request = Request(
                    wish.prompt,
                    wish.max_tokens,
                    self._listener(index),
                    wish.sampling,
                    wish.stop_tokens,
                    wish.priority,
                    wish.constraint,
                    wish.scores,
                )
                engine.submit(request)
                self._choices.append(_Choice(request, AnswerText(decode, wish.prompt, wish.stops)))
        except Exception:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End what still runs."""
        for choice in self._choices:
            if not choice.done:
                self._engine.cancel(choice.request)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        left = len(self._choices)
        while left:
            index, event = await self._events.get()
            choice = self._choices[index]
            if isinstance(event, FinishEvent):
                left -= 1
                self.usage.cached += event.reused_tokens
                if choice.done:
                    continue  # ended by a stop string, which the engine has heard of now
                yield self._finish(index, choice, event)
            elif isinstance(event, ScoredEvent):
                yield Piece(index, "", event.tokens)
            elif not choice.done:
                piece = self._add(index, choice, event)
                if piece is not None:
                    yield piece

    def _listener(self, index: int) -> Listener:
        def hear(event: Event) -> None:
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return hear

    def _add(self, index: int, choice: _Choice, event: TokenEvent) -> Piece | None:
        text = choice.text.add(event.token)
        self.usage.completion += 1
        choice.held.append(event)
        if choice.text.stopped is not None:
            self._engine.cancel(choice.request)
            choice.done = True
            return Piece(index, text, tuple(choice.held), Finish.STOP.value)
        if not text and event.logprob is None:
            return None
        tokens, choice.held = tuple(choice.held), []
        return Piece(index, text, tokens)

    def _finish(self, index: int, choice: _Choice, event: FinishEvent) -> Piece:
        choice.done = True
        if event.reason is Finish.FAILED:
            raise ApiError(500, event.error or "the request failed", code="generation_failed")
        if event.reason is Finish.CANCELLED:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        text = choice.text.finish()
        reason = Finish.STOP if choice.text.stopped is not None else event.reason
        return Piece(index, text, tuple(choice.held), reason.value)
