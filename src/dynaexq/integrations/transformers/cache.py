"""A key-value cache that writes new tokens in place: the usual one copies all earlier tokens at every step."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

FIRST_ROOM = 256
"""Tokens that a layer makes room for at first; later it doubles."""


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [batch, heads, tokens, width] at the front of larger buffers."""

    def __init__(self, room: int = FIRST_ROOM) -> None:
        super().__init__()
        self._room = room
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._buffers is None or not self._owns(end, key_states.shape[0]):
            self._buffers = (self._grow(self.keys, key_states, end), self._grow(self.values, value_states, end))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., start:end, :] = new
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
        return self.keys, self.values

    def _owns(self, end: int, batch: int) -> bool:
        """Whether the buffers have room for `end` tokens and still hold what the cache holds (it may be cropped,
        repeated or reordered into other tensors)."""
        assert self._buffers is not None
        return (
            end <= self._buffers[0].shape[-2]
            and self._buffers[0].shape[0] == batch
            and self.keys is not None
            and self.keys.data_ptr() == self._buffers[0].data_ptr()
            and self.values.data_ptr() == self._buffers[1].data_ptr()
        )

    def _grow(self, held: torch.Tensor, new: torch.Tensor, end: int) -> torch.Tensor:
        tokens = held.shape[-2] if held.numel() else 0
        buffer = new.new_empty((*new.shape[:-2], max(self._room, 2 * tokens, end), new.shape[-1]))
        if tokens:
            buffer[..., :tokens, :] = held
        return buffer


def make_cache(config: Any, tokens: int) -> DynamicCache:
    """A cache for a model of `config`, its full-attention layers with room for `tokens` tokens."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer(tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
