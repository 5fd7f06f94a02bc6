"""How each endpoint writes a choice: chunks of a stream as pieces come, or one object at the end."""

from __future__ import annotations

from typing import Any, Protocol

from dynaexq.engine import TokenEvent
from dynaexq.integrations.transformers.prompts import PromptEncoder
from dynaexq.server.answers import Piece
from dynaexq.server.parsing import OutputParser, Parsed, ToolCall

Json = dict[str, Any]


class ChoiceWriter(Protocol):
    """One choice of an answer, which it gathers piece by piece."""

    def begin(self) -> list[Json]:
        """Chunks before the first piece."""

    def add(self, piece: Piece) -> list[Json]:
        """Chunks that a piece amounts to."""

    def whole(self) -> Json:
        """The choice, after its last piece."""


class ChatWriter:
    """A choice of a chat: thoughts, content, tool calls."""

    def __init__(self, index: int, encoder: PromptEncoder, parser: OutputParser) -> None:
        self._index, self._encoder, self._parser = index, encoder, parser
        self._all = Parsed()
        self._tokens: list[TokenEvent] = []
        self._finish = ""

    def begin(self) -> list[Json]:
        """OpenAI's first chunk names the role."""
        return [self._chunk({"role": "assistant", "content": ""}, None, None)]

    def add(self, piece: Piece) -> list[Json]:
        """At most one chunk, but for the last, which says the reason alone."""
        parsed = self._parser.add(piece.text)
        if piece.finish is not None:
            rest = self._parser.finish()
            parsed = Parsed(parsed.content + rest.content, parsed.reasoning + rest.reasoning, parsed.calls + rest.calls)
        first = len(self._all.calls)
        self._all.content += parsed.content
        self._all.reasoning += parsed.reasoning
        self._all.calls += parsed.calls
        self._tokens += piece.tokens
        chunks = []
        logprobs = self._logprobs(list(piece.tokens))
        if parsed or logprobs:
            chunks.append(self._chunk(_delta(parsed, first), logprobs, None))
        if piece.finish is not None:
            self._finish = "tool_calls" if self._parser.called and piece.finish == "stop" else piece.finish
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
        text = self._encoder.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class TextWriter:
    """A choice of a plain completion."""

    def __init__(self, index: int, encoder: PromptEncoder) -> None:
        self._index, self._encoder = index, encoder
        self._text = self._finish = ""
        self._tokens: list[TokenEvent] = []

    def begin(self) -> list[Json]:
        """Nothing."""
        return []

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
        known = [token for token in tokens if token.logprob is not None]
        if not known:
            return None
        decode = self._encoder.decode
        texts = [decode([token.token]) for token in known]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in known],
            "top_logprobs": [{decode([other.token]): other.logprob for other in each.alternatives} for each in known],
            "text_offset": [sum(map(len, texts[:i])) for i in range(len(texts))],
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


def _call_delta(index: int, call: ToolCall) -> Json:
    return {"index": index, **call.as_json()}
