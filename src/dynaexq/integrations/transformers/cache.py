"""A key-value cache that writes new tokens in place: the usual one copies all earlier tokens at every step."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer


class Place(NamedTuple):
    """Where a new token goes: buffers [batch, heads, room, width], and how many tokens are there before it."""

    keys: torch.Tensor
    values: torch.Tensor
    past: int


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [batch, heads, tokens, width] at the front of larger buffers, which double when they are full."""

    def __init__(self, room: int) -> None:
        """`room`: tokens to make room for at first."""
        super().__init__()
        self._room = room
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.reserve(key_states.shape[-2], key_states, value_states)
        end = place.past + key_states.shape[-2]
        for buffer, new in ((place.keys, key_states), (place.values, value_states)):
            buffer[..., place.past : end, :] = new
        self._show(place, end)
        return self.keys, self.values

    def reserve(self, tokens: int, keys_like: torch.Tensor, values_like: torch.Tensor) -> Place:
        """Buffers with room for `tokens` more, of the batch, heads, width and dtype of the examples."""
        past = self.get_seq_length()
        if not self._owns(past + tokens, keys_like.shape[0]):
            keys, values = self.keys, self.values
            self._buffers = (
                self._grow(keys, keys_like, past, past + tokens),
                self._grow(values, values_like, past, past + tokens),
            )
        assert self._buffers is not None
        return Place(*self._buffers, past)

    def append_one(self) -> Place:
        """Make the next token part of an initialised cache; the caller writes its key and value."""
        place = self.reserve(1, self.keys, self.values)
        self._show(place, place.past + 1)
        return place

    def _show(self, place: Place, end: int) -> None:
        self.keys, self.values = place.keys[..., :end, :], place.values[..., :end, :]

    def _owns(self, end: int, batch: int) -> bool:
        """Whether the buffers have room for `end` tokens and are what the cache shows: it may have been repeated or
        reordered into other tensors."""
        return (
            self._buffers is not None
            and end <= self._buffers[0].shape[-2]
            and self._buffers[0].shape[0] == batch
            and self.keys is not None
            and self.keys.data_ptr() == self._buffers[0].data_ptr()
            and self.values.data_ptr() == self._buffers[1].data_ptr()
        )

    def _grow(self, held: torch.Tensor, like: torch.Tensor, past: int, end: int) -> torch.Tensor:
        buffer = like.new_empty((*like.shape[:-2], max(self._room, 2 * past, end), like.shape[-1]))
        if past:
            buffer[..., :past, :] = held
        return buffer


def make_cache(config: Any, tokens: int) -> DynamicCache:
    """A cache for a model of `config`, its full-attention layers with room for `tokens` tokens."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer(tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_argument(model: Any) -> str:
    """What this version of Transformers calls a cache that is passed in."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
