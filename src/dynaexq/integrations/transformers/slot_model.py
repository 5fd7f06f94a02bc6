"""A loaded model behind the engine's interface: its own forward over a cache in slots, native decode steps where it has
them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from dynaexq.integrations.transformers.attention import use_grouped_attention
from dynaexq.integrations.transformers.cache import cache_argument
from dynaexq.integrations.transformers.kept import kept_dtype
from dynaexq.integrations.transformers.native_decoder import Cache, NativeDecoder, Sequences
from dynaexq.integrations.transformers.quantizer import runtime_of
from dynaexq.integrations.transformers.slot_cache import SlotCache
from dynaexq.plan.memory import gathered
from dynaexq.traffic.recorder import TokenRun

WHOLE_PROMPTS = {"jamba"}
"""Families whose forward over several tokens ignores the state before them (Transformers 5.24)."""


class SlottedModel:
    """See `engine.base.SlotModel`. Models with recurrent layers cannot go back to an earlier length."""

    def __init__(self, model: Any, slots: int, room: int, kv: str | None = None) -> None:
        """Allocate the keys and values of all slots, kept in dtype `kv` (see kept.py).

        Raises:
            OptionError, UnsupportedModelError: they cannot be kept so, or not in slots.
        """
        config = model.config.get_text_config()
        self.slots, self.room, self.vocabulary = slots, room, int(config.vocab_size)
        self.chunked = config.model_type not in WHOLE_PROMPTS
        self._model, self._runtime = model, runtime_of(model)
        use_grouped_attention(config)
        self._cache = SlotCache(model.config, slots, room, kept_dtype(kv, model.dtype))
        self.cuts = not self._cache.states
        self._argument = cache_argument(model)
        self._masks = _Masks(config, model.dtype)
        self._decoder: NativeDecoder | None = getattr(model, "dynaexq_decoder", None)
        self._caches: list[Cache] = []
        self._warm_up()

    def window(self, prefill: bool, runs: Sequence[TokenRun]) -> AbstractContextManager[None]:
        """One engine step."""
        return self._runtime.window(prefill, runs)

    def prefill(self, slot: int, past: int, tokens: torch.Tensor) -> torch.Tensor:
        """Append tokens [count] to a sequence: logits of the last [vocabulary]."""
        return self.score(slot, past, tokens, 1)[0]

    def score(self, slot: int, past: int, tokens: torch.Tensor, count: int) -> torch.Tensor:
        """Append tokens [tokens] to a sequence: logits of the last `count` [count, vocabulary]."""
        self._cache.describe_chunk(slot, past, len(tokens))
        positions = torch.arange(past, past + len(tokens)).unsqueeze(0)
        return self._forward(tokens.unsqueeze(0), positions, count)[0]

    def decode(self, slots: list[int], pasts: list[int], tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to each sequence: logits [count, vocabulary]."""
        if self._decoder is not None and self._decoder.can_step(len(slots)):
            places = torch.tensor(pasts, dtype=torch.int32)
            sequences = Sequences(places, torch.tensor(slots, dtype=torch.int32), places)
            return self._decoder.step(tokens, sequences, self._caches)
        return torch.cat([self._decode_some(slots[part], pasts[part], tokens[part]) for part in self._parts(pasts)])

    def _parts(self, pasts: list[int]) -> list[slice]:
        """Sequences in a row whose keys and values together are no longer than what is planned to be copied."""
        most, start, longest, parts = gathered(self.slots) * self.room, 0, 0, []
        for place, past in enumerate(pasts):
            longest = max(longest, past + 1)
            if (place + 1 - start) * longest > most:
                parts.append(slice(start, place))
                start, longest = place, past + 1
        return [*parts, slice(start, len(pasts))]

    def _decode_some(self, slots: list[int], pasts: list[int], tokens: torch.Tensor) -> torch.Tensor:
        self._cache.describe_step(slots, pasts)
        return self._forward(tokens.unsqueeze(1), torch.tensor(pasts).unsqueeze(1), 1)[:, 0]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the beginning of a sequence."""
        self._cache.copy(source, target, length)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
        cache = self._cache
        cache.load_states()
        result = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._masks.make(positions, cache.call.longest),
            **{self._argument: cache.transformers},
            use_cache=True,
            logits_to_keep=count,
        )
        cache.save_states()
        logits: torch.Tensor = result.logits[:, -count:].float()
        return logits

    def _warm_up(self) -> None:
        """Allocate everything with a first token, which is no traffic."""
        with self._runtime.trial(), torch.inference_mode():
            self.prefill(0, 0, torch.zeros(1, dtype=torch.int64))
        if self._decoder is not None and self._model.dtype is not torch.float32:
            self._decoder = None
        if self._decoder is not None:
            for keys, values in (layer.kept for layer in self._cache.layers):
                self._caches.append(Cache(keys.numbers, values.numbers, keys.scales, values.scales))
            self._decoder.rotary.reach(self.room)


class _Masks:
    """Attention masks in the form that a family wants: one, or one for each kind of layer."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        kinds = set(getattr(config, "layer_types", None) or ())
        # some families have the number and use it nowhere
        self._window: int | None = None if kinds == {"full_attention"} else getattr(config, "sliding_window", None)
        self._by_kind = len(kinds) > 1

    def make(self, positions: torch.Tensor, longest: int) -> Any:
        """For tokens at `positions` [sequences, tokens], each of which sees what is not after it."""
        places = torch.arange(longest)
        queries = positions.unsqueeze(-1)
        seen = places <= queries  # [sequences, tokens, longest]
        near = seen if self._window is None else seen & (places > queries - self._window)
        if not self._by_kind:
            return self._additive(near)
        full, sliding = self._additive(seen), self._additive(near)
        return {"full_attention": full, "sliding_attention": sliding, "linear_attention": None}

    def _additive(self, seen: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(seen.shape, dtype=self._dtype)
        return mask.masked_fill_(~seen, torch.finfo(self._dtype).min).unsqueeze(1)
