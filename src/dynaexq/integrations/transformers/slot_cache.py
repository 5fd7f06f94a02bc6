"""A cache of many sequences in slots: unmodified models read and write theirs through Transformers' own interface."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from dynaexq.core import UnsupportedModelError
from dynaexq.integrations.transformers.kept import Kept


@dataclass
class Call:
    """What the forward pass in progress is about: `rows` int64 [count] are slots, `pasts` their lengths.

    A prompt's chunk is of one slot; otherwise each sequence adds one token. `longest` is the number of tokens that
    attention sees at most.
    """

    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    pasts: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    slot: int | None = None
    past: int = 0
    longest: int = 1


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [slots, heads, room, width] of one attention layer."""

    is_sliding = False

    def __init__(self, slots: int, room: int, kept: torch.dtype, call: Call) -> None:
        super().__init__()
        self._slots, self._room, self._dtype, self._call = slots, room, kept, call
        self.kept: list[Kept] = []

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the heads and widths of the examples."""
        self.kept = [
            Kept((self._slots, each.shape[1], self._room, each.shape[-1]), self._dtype)
            for each in (key_states, value_states)
        ]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens; returns what attention sees."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        call, seen = self._call, []
        for held, new in zip(self.kept, (key_states, value_states), strict=True):
            if call.slot is not None:
                held.store((call.slot, slice(None), slice(call.past, call.longest)), new[0])
                rows: Any = slice(call.slot, call.slot + 1)
            else:
                held.store((call.rows, slice(None), call.pasts), new[:, :, 0])
                rows = call.rows
            seen.append(held.load((rows, slice(None), slice(call.longest)), new.dtype))
        return seen[0], seen[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what attention sees."""
        return self._call.longest, 0

    def get_seq_length(self) -> int:
        """Tokens before this call, of the longest sequence."""
        return self._call.past if self._call.slot is not None else self._call.longest - 1

    def get_max_length(self) -> int:
        """Room of a slot."""
        return self._room


class SlotStates:
    """The states [slots, ...] of a recurrent layer, which itself holds those of the call in progress."""

    def __init__(self, layer: LinearAttentionLayer, slots: int) -> None:
        self._layer, self._slots = layer, slots
        self._held: dict[tuple[str, int], torch.Tensor] = {}

    def load(self, call: Call) -> None:
        """Give the layer the states of the call's slots; a prompt's beginning starts without."""
        layer = self._layer
        if call.slot is not None and call.past == 0:
            layer.__init__(number_of_states=layer.number_of_states)
            return
        for (name, index), held in self._held.items():
            getattr(layer, name)[index] = held[call.rows]

    def save(self, call: Call) -> None:
        """Take the states back."""
        for name in ("conv_states", "recurrent_states"):
            for index, state in getattr(self._layer, name).items():
                if state is None:
                    continue
                if (name, index) not in self._held:
                    self._held[name, index] = state.new_zeros((self._slots, *state.shape[1:]))
                self._held[name, index][call.rows] = state


class SlotCache:
    """The cache of a model of `config`: `slots` sequences of up to `room` tokens."""

    def __init__(self, config: Any, slots: int, room: int, kept: torch.dtype) -> None:
        """Keys and values in dtype `kept`. Raises UnsupportedModelError for a model that keeps something else."""
        self.call = Call()
        self.layers: list[SlotLayer] = []
        self.states: list[SlotStates] = []
        layers = []
        for index, usual in enumerate(DynamicCache(config=config).layers):
            if type(usual) in (DynamicLayer, DynamicSlidingWindowLayer):
                self.layers.append(SlotLayer(slots, room, kept, self.call))
                layers.append(self.layers[-1])
            elif type(usual) is LinearAttentionLayer:
                self.states.append(SlotStates(usual, slots))
                layers.append(usual)
            else:
                raise UnsupportedModelError(
                    f"layer {index} keeps a {type(usual).__name__}, which cannot be held for several sequences at once"
                )
        self.transformers = Cache(layers=layers)

    def describe_chunk(self, slot: int, past: int, tokens: int) -> None:
        """The next forward adds `tokens` to the sequence in `slot`, which has `past`."""
        self._describe([slot], [past])
        self.call.slot, self.call.past, self.call.longest = slot, past, past + tokens

    def describe_step(self, slots: list[int], pasts: list[int]) -> None:
        """The next forward adds one token to each sequence."""
        self._describe(slots, pasts)
        self.call.slot, self.call.longest = None, max(pasts) + 1

    def _describe(self, slots: list[int], pasts: list[int]) -> None:
        self.call.rows, self.call.pasts = torch.tensor(slots), torch.tensor(pasts)

    def load_states(self) -> None:
        """Before a forward."""
        for states in self.states:
            states.load(self.call)

    def save_states(self) -> None:
        """After a forward."""
        for states in self.states:
            states.save(self.call)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens from slot to slot."""
        for layer in self.layers:
            for held in layer.kept:
                held.copy(source, target, length)
