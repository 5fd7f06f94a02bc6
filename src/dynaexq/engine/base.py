"""What the engine needs of a model: sequences in slots, a prompt's chunk at a time, one token of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from dynaexq.traffic.recorder import TokenRun


class SlotModel(Protocol):
    """A loaded model that keeps the tokens of up to `slots` sequences, `room` of them each.

    All calls come from one thread. Slots are numbered from 0; `pasts` are the tokens a slot holds of its sequence.
    """

    slots: int
    room: int
    vocabulary: int
    chunked: bool
    """Whether a prompt may come in several chunks; else it comes whole."""
    cuts: bool
    """Whether a slot can go back to any earlier length (recurrent states cannot)."""

    def window(self, prefill: bool, runs: Sequence[TokenRun]) -> AbstractContextManager[None]:
        """One engine step: all forwards within run on the same expert versions. `runs`: whose tokens it computes."""

    def prefill(self, slot: int, past: int, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens, int64 [count], to the sequence in `slot`: logits of the last, float32 [vocabulary]."""

    def score(self, slot: int, past: int, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """Like prefill: logits of the last `count` tokens, float32 [count, vocabulary]."""

    def decode(self, slots: list[int], pasts: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """Append one token, int64 [count], to each sequence: logits, float32 [count, vocabulary]."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the sequence in `target` the first `length` tokens of that in `source`; only where it `cuts`."""
