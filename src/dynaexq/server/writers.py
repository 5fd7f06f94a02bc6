"""How an endpoint writes answers: events of a stream as pieces come, or one object at the end."""

from __future__ import annotations

from typing import Any, Protocol

from dynaexq.server.answers import Piece, Usage
from dynaexq.server.errors import ApiError
from dynaexq.server.parsing import OutputParser, Parsed

Json = dict[str, Any]


class AnswerWriter(Protocol):
    """The answer to one request, which it gathers piece by piece."""

    ending: str
    """What ends a stream that nothing went wrong with."""

    def begin(self) -> list[Json]:
        """Events before the first piece."""

    def add(self, piece: Piece) -> list[Json]:
        """Events that a piece amounts to."""

    def end(self, usage: Usage) -> list[Json]:
        """Events after the last piece."""

    def fail(self, error: ApiError) -> list[Json]:
        """Events that end a stream when something goes wrong."""

    def frame(self, event: Json) -> str:
        """An event as it is sent."""

    def whole(self, usage: Usage) -> Json:
        """The answer, after its last piece."""


class PieceReader:
    """Reads thoughts, text and calls out of the pieces of one choice."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self.thought_tokens = 0
        """Tokens from the first of the thoughts to the tag that ends them."""

    def read(self, piece: Piece) -> list[Parsed]:
        """What it says, part by part."""
        before = self._parser.thinking
        parts = list(self._parser.split(piece.text, last=piece.finish is not None))
        if before or self._parser.thinking:
            self.thought_tokens += len(piece.tokens)
        return parts
