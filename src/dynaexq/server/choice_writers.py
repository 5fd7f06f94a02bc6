"""Answers in the form of chat and plain completions: choices, and chunks of them."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from dynaexq.engine import TokenEvent
from dynaexq.engine.text import Decode
from dynaexq.server.answers import Piece, Usage
from dynaexq.server.errors import ApiError
from dynaexq.server.parsing import OutputParser, Parsed, ToolCall
from dynaexq.server.writers import Json, PieceReader


class ChoiceWriter(Protocol):
    """One choice of an answer."""

    @property
    def thought_tokens(self) -> int:
        """Those of its tokens that were thoughts."""

    def begin(self) -> list[Json]:
        """Chunks before the first piece."""

    def add(self, piece: Piece) -> list[Json]:
        """Chunks that a piece amounts to."""

    def whole(self) -> Json:
        """The choice, after its last piece."""


class Style(NamedTuple):
    """What an endpoint calls its things: prefix of ids, and kinds of objects."""

    prefix: str
    kind: str
    chunk_kind: str


class ChoicesWriter:
    """See `writers.AnswerWriter`."""

    ending = "data: [DONE]\n\n"

    def __init__(self, style: Style, model: str, choices: Sequence[ChoiceWriter], wants_usage: bool) -> None:
        self._style, self._choices, self._wants_usage = style, choices, wants_usage
        self._head = {"id": f"{style.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def begin(self) -> list[Json]:
        """What each choice begins with."""
        return [self._chunk(chunk) for choice in self._choices for chunk in choice.begin()]

    def add(self, piece: Piece) -> list[Json]:
        """Chunks of its choice."""
        return [self._chunk(chunk) for chunk in self._choices[piece.index].add(piece)]

    def end(self, usage: Usage) -> list[Json]:
        """The usage, if it is wanted."""
        head = {**self._head, "object": self._style.chunk_kind, "choices": []}
        return [{**head, "usage": self._usage(usage)}] if self._wants_usage else []

    def fail(self, error: ApiError) -> list[Json]:
        """The error."""
        return [error.body()]

    def frame(self, event: Json) -> str:
        """Without a name."""
        return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"

    def whole(self, usage: Usage) -> Json:
        """All choices."""
        choices = [choice.whole() for choice in self._choices]
        return {**self._head, "object": self._style.kind, "choices": choices, "usage": self._usage(usage)}

    def _chunk(self, chunk: Json) -> Json:
        empty = {"usage": None} if self._wants_usage else {}
        return {**self._head, "object": self._style.chunk_kind, "choices": [chunk], **empty}

    def _usage(self, usage: Usage) -> Json:
        return {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "completion_tokens_details": {"reasoning_tokens": sum(each.thought_tokens for each in self._choices)},
        }


class ChatWriter:
    """A choice of a chat: thoughts, content, tool calls."""

    def __init__(self, index: int, decode: Decode, parser: OutputParser) -> None:
        self._index, self._decode, self._reader = index, decode, PieceReader(parser)
        self._all = Parsed()
        self._tokens: list[TokenEvent] = []
        self._finish = ""

    @property
    def thought_tokens(self) -> int:
        """Those of its tokens that were thoughts."""
        return self._reader.thought_tokens

    def begin(self) -> list[Json]:
        """OpenAI's first chunk names the role."""
        return [self._chunk({"role": "assistant", "content": ""}, None, None)]

    def add(self, piece: Piece) -> list[Json]:
        """At most one chunk, but for the last, which says the reason alone."""
        first, parsed = len(self._all.calls), Parsed()
        for part in self._reader.read(piece):
            parsed.extend(part)
        self._all.extend(parsed)
        self._tokens += piece.tokens
        chunks = []
        logprobs = self._logprobs(list(piece.tokens))
        if parsed or logprobs:
            chunks.append(self._chunk(_delta(parsed, first), logprobs, None))
        if piece.finish is not None:
            self._finish = "tool_calls" if self._all.calls and piece.finish == "stop" else piece.finish
            chunks.append(self._chunk({}, None, self._finish))
        return chunks

    def whole(self) -> Json:
        """The choice."""
        message: Json = {"role": "assistant", "content": self._all.content, "refusal": None}
        if self._all.reasoning:
            message["reasoning_content"] = self._all.reasoning
        if self._all.calls:
            message["tool_calls"] = [call.as_json() for call in self._all.calls]
            message["content"] = self._all.content or None
        logprobs = self._logprobs(self._tokens)
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish}

    def _chunk(self, delta: Json, logprobs: Json | None, finish: str | None) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: list[TokenEvent]) -> Json | None:
        known = [token for token in tokens if token.logprob is not None]
        return {"content": [self._logprob(token) for token in known], "refusal": None} if known else None

    def _logprob(self, event: TokenEvent) -> Json:
        best = [self._entry(other.token, other.logprob) for other in event.alternatives]
        return {**self._entry(event.token, event.logprob), "top_logprobs": best}

    def _entry(self, token: int, logprob: float | None) -> Json:
        text = self._decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextWriter:
    """A choice of a plain completion, which may begin with its prompt."""

    thought_tokens = 0

    def __init__(self, index: int, decode: Decode, echo: str) -> None:
        self._index, self._decode = index, decode
        self._text, self._finish = echo, ""
        self._tokens: list[TokenEvent] = []

    def begin(self) -> list[Json]:
        """The prompt, if it is wanted."""
        return [self._choice(self._text, [], None)] if self._text else []

    def add(self, piece: Piece) -> list[Json]:
        """One chunk."""
        self._text += piece.text
        self._tokens += piece.tokens
        self._finish = piece.finish or ""
        return [self._choice(piece.text, list(piece.tokens), piece.finish)]

    def whole(self) -> Json:
        """The choice."""
        return self._choice(self._text, self._tokens, self._finish)

    def _choice(self, text: str, tokens: list[TokenEvent], finish: str | None) -> Json:
        return {"index": self._index, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def _logprobs(self, tokens: list[TokenEvent]) -> Json | None:
        if all(token.logprob is None for token in tokens):
            return None
        texts = [self._decode([token.token]) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                None
                if each.logprob is None  # the first of a text
                else {self._decode([other.token]): other.logprob for other in each.alternatives}
                for each in tokens
            ],
            "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=0)),
        }


def _delta(parsed: Parsed, first_call: int) -> Json:
    delta: Json = {}
    if parsed.content:
        delta["content"] = parsed.content
    if parsed.reasoning:
        delta["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        delta["tool_calls"] = [_call_delta(first_call + i, call) for i, call in enumerate(parsed.calls)]
    return delta


def _call_delta(index: int, call: ToolCall) -> dict[str, Any]:
    return {"index": index, **call.as_json()}
