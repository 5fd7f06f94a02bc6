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
    """Keys and values [batch, heads, tokens, width] at the front of larger buffers, which double when they are full.

    `keys` and `values` are views, made when somebody asks. Transformers repeats, reorders and crops a cache by setting
    them: what is set is copied into new buffers with the next token.
    """

    def __init__(self, room: int) -> None:
        """`room`: tokens to make room for at first."""
        self._room = room
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self._set: list[torch.Tensor | None] = [None, None]
        self._length = 0
        super().__init__()

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys [batch, heads, tokens, width]; None before the first."""
        return self._show(0)

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._replace(0, tensor)

    @property
    def values(self) -> torch.Tensor | None:
        """All values, like the keys."""
        return self._show(1)

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._replace(1, tensor)

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        return self._length if self._buffers is not None else int(super().get_seq_length())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        place = self.append(key_states.shape[-2], key_states, value_states)
        for buffer, new in ((place.keys, key_states), (place.values, value_states)):
            buffer[..., place.past : self._length, :] = new
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def append_one(self) -> Place:
        """Make the next token part of a cache that has some; the caller writes its key and value."""
        if self._buffers is not None and self._length < self._buffers[0].shape[-2]:
            self._length += 1
            return Place(*self._buffers, self._length - 1)
        assert self.keys is not None and self.values is not None
        return self.append(1, self.keys, self.values)

    def append(self, tokens: int, keys_like: torch.Tensor, values_like: torch.Tensor) -> Place:
        """Make `tokens` more part of the cache, of the batch, heads, width and dtype of the examples."""
        past = self.get_seq_length()
        buffers = self._buffers
        if buffers is None or past + tokens > buffers[0].shape[-2] or buffers[0].shape[0] != keys_like.shape[0]:
            buffers = (self._grow(0, keys_like, past + tokens), self._grow(1, values_like, past + tokens))
        self._buffers, self._length = buffers, past + tokens
        return Place(*buffers, past)

    def _show(self, which: int) -> torch.Tensor | None:
        return self._set[which] if self._buffers is None else self._buffers[which][..., : self._length, :]

    def _replace(self, which: int, tensor: torch.Tensor | None) -> None:
        if self._buffers is not None:
            self._set = [self._show(0), self._show(1)]
            self._buffers = None
        self._set[which] = tensor

    def _grow(self, which: int, like: torch.Tensor, end: int) -> torch.Tensor:
        past, held = self.get_seq_length(), self._show(which)
        buffer = like.new_empty((*like.shape[:-2], max(self._room, 2 * past, end), like.shape[-1]))
        if past and held is not None:
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
