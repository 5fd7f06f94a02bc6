"""A model that says what a test wants it to say, byte by byte, with a tokenizer to match."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

END = 256


class ByteTokenizer:
    """One token a byte, and one for the end; `template` is a chat template's text, which is only looked at."""

    eos_token_id = END

    def __init__(self, template: str, prompt_end: str = "") -> None:
        self.chat_template = template
        self.asked: list[dict[str, Any]] = []
        self._prompt_end = prompt_end

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, **_: Any) -> list[int]:
        """Bytes."""
        return list(text.encode())

    def apply_chat_template(self, messages: Any, tools: Any, **variables: Any) -> dict[str, list[int]]:
        """Keeps what it was asked."""
        self.asked.append({"messages": messages, "tools": tools, **variables})
        return self(f"{messages[-1]['content']}{self._prompt_end}")

    def decode(self, tokens: list[int], **_: Any) -> str:
        """Text."""
        return bytes(token for token in tokens if token < END).decode("utf-8", errors="replace")


class TypedModel:
    """See `engine.base.SlotModel`: every sequence says `script`, then ends."""

    vocabulary = END + 1
    chunked = cuts = True

    def __init__(self, script: str, slots: int = 2, room: int = 2048) -> None:
        self.script, self.slots, self.room = script.encode(), slots, room
        self._lengths: dict[int, int] = {}

    @contextmanager
    def window(self, prefill: bool) -> Iterator[None]:
        """Nothing."""
        yield

    def prefill(self, slot: int, past: int, tokens: torch.Tensor) -> torch.Tensor:
        """The first byte comes after the prompt."""
        self._lengths[slot] = past + len(tokens)
        return self._say(0)

    def decode(self, slots: list[int], pasts: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """The next byte of each."""
        return torch.stack([self._say(past - self._lengths[slot] + 1) for slot, past in zip(slots, pasts, strict=True)])

    def copy(self, source: int, target: int, length: int) -> None:
        """Nothing."""

    def _say(self, place: int) -> torch.Tensor:
        logits = torch.zeros(self.vocabulary)
        logits[self.script[place] if place < len(self.script) else END] = 1.0
        return logits
