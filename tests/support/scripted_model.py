"""A model for the engine that computes nothing: the next token follows from all tokens before it, so that any token in
a wrong slot, order or number shows in the answer."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from dynaexq.traffic.recorder import TokenRun

VOCABULARY = 64


def next_token(tokens: Sequence[int]) -> int:
    """What the model says after `tokens`."""
    return zlib.crc32(bytes(tokens)) % VOCABULARY


def answer(prompt: Sequence[int], count: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """What a greedy request gets."""
    tokens = list(prompt)
    for _ in range(count):
        token = next_token(tokens)
        if token in stops:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class ScriptedModel:
    """See `engine.base.SlotModel`. Slots that cannot be cut hold a state of all their tokens."""

    vocabulary = VOCABULARY

    def __init__(self, slots: int = 3, room: int = 64, chunked: bool = True, cuts: bool = True) -> None:
        self.slots, self.room, self.chunked, self.cuts = slots, room, chunked, cuts
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.steps: list[tuple[int, int]] = []
        self.fail_next = False
        self.error: Exception = RuntimeError("scripted")
        self._open = False

    @contextmanager
    def window(self, prefill: bool, runs: Sequence[TokenRun]) -> Iterator[None]:
        """Everything within is one step."""
        assert not self._open
        self._open = True
        self.steps.append((0, 0))
        yield
        self._open = False

    def prefill(self, slot: int, past: int, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens to one slot."""
        self._append(slot, past, tokens.tolist())
        prompt, decoded = self.steps[-1]
        self.steps[-1] = (prompt + len(tokens), decoded)
        return self._logits(slot)

    def score(self, slot: int, past: int, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """One after the other."""
        rows = [self.prefill(slot, past + place, tokens[place : place + 1]) for place in range(len(tokens))]
        return torch.stack(rows[-count:])

    def decode(self, slots: list[int], pasts: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """Append a token to each."""
        assert len(set(slots)) == len(slots)
        for slot, past, token in zip(slots, pasts, tokens.tolist(), strict=True):
            self._append(slot, past, [token])
        prompt, _ = self.steps[-1]
        self.steps[-1] = (prompt, len(slots))
        return torch.stack([self._logits(slot) for slot in slots])

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a beginning."""
        assert self.cuts and not self._open and len(self.held[source]) >= length
        self.held[target] = self.held[source][:length]

    def _append(self, slot: int, past: int, tokens: list[int]) -> None:
        if self.fail_next:
            self.fail_next = self._open = False
            raise self.error
        assert self._open and past <= len(self.held[slot]) and past + len(tokens) <= self.room
        assert self.cuts or past in (0, len(self.held[slot]))
        assert self.chunked or len(tokens) == 1 or past == 0
        self.held[slot] = self.held[slot][:past] + tokens

    def _logits(self, slot: int) -> torch.Tensor:
        logits = torch.zeros(VOCABULARY)
        logits[next_token(self.held[slot])] = 9.0
        return logits
