"""Decode steps of a whole model in one native call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from dynaexq.integrations.transformers.decoder_parts import (
    NativeLayer,
    UnfitLayerError,
    Watched,
    find_norm,
    find_projection,
)
from dynaexq.integrations.transformers.dense import PackedEmbedding
from dynaexq.kernels.threads import thread_count
from dynaexq.native import DecoderModel

LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Rotary embeddings whose angles change with the length of the text."""

POSITIONS_AT_ONCE = 1024
KV_FORMATS = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
"""As KvFormat in native/kernels/tiles.hpp counts them."""


class Cache(NamedTuple):
    """Keys and values of one layer, [slots, kv_heads, room, width], contiguous in the last two dimensions; int8 with
    contiguous scales, float32 [slots, kv_heads, room]."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class Sequences(NamedTuple):
    """The sequences of a step, int32 [count] each: where each one's token is in the text, its slot in the cache, and
    how many tokens are there before it."""

    positions: torch.Tensor
    slots: torch.Tensor
    pasts: torch.Tensor


class RotaryTable:
    """Cosines and sines [positions, width] of a model's rotary embedding, computed by itself, for all positions."""

    def __init__(self, rotary: nn.Module) -> None:
        """Raises UnfitLayerError where angles do not depend on positions alone."""
        if getattr(rotary, "rope_type", "default") in LENGTH_DEPENDENT:
            raise UnfitLayerError("rotary angles that depend on the length of the text")
        self._rotary = rotary
        self.cosine = self.sine = torch.empty(0, 0)

    def reach(self, positions: int) -> None:
        """Make the table hold at least `positions` positions."""
        held = len(self.cosine)
        if positions <= held:
            return
        wanted = -(-positions // POSITIONS_AT_ONCE) * POSITIONS_AT_ONCE
        with torch.no_grad():
            cosine, sine = self._rotary(torch.empty(1, 0), position_ids=torch.arange(wanted).unsqueeze(0))
        self.cosine, self.sine = cosine[0].contiguous(), sine[0].contiguous()


class NativeDecoder:
    """Embedding, decoder layers, last norm and output head of one model."""

    def __init__(self, decoder: Any, head: Any, layers: list[NativeLayer]) -> None:
        """`layers` are all layers of `decoder`. Raises UnfitLayerError or AttributeError for other forms of parts."""
        embedding = decoder.embed_tokens
        if type(embedding) is not PackedEmbedding or embedding.rows is None:
            raise UnfitLayerError("an embedding that is not packed")
        self.layers, self.rotary = layers, RotaryTable(decoder.rotary_emb)
        self.vocabulary: int = head.out_features
        self._hidden: int = embedding.embedding_dim
        self._runtime, self._top_k = layers[0].runtime, layers[0].top_k
        self._watched = Watched([decoder, embedding, decoder.norm, decoder.rotary_emb, head])
        self._held: list[Any] = [embedding.rows]
        values, scale, group = embedding.rows.parts()
        self._native = DecoderModel(
            hidden=embedding.embedding_dim,
            embedding=(values.data_ptr(), 0 if scale is None else scale.data_ptr(), group, len(values)),
            layers=[layer.native for layer in layers],
            norm=find_norm(decoder.norm, self._held),
            head=find_projection(head, self._held),
        )

    def can_step(self, sequences: int) -> bool:
        """Whether nobody watches the inside, a window is open, experts still go through the native kernel, and those of
        a layer are reachable at once."""
        free = all(layer.usable for layer in self.layers) and not self._watched.changed
        return free and self._runtime.in_window and self._runtime.reaches(sequences * self._top_k)

    def step(self, tokens: torch.Tensor, sequences: Sequences, caches: list[Cache]) -> torch.Tensor:
        """One token a sequence, int64 [count], within a window: logits, float32 [count, vocabulary].

        Each layer's keys and values are written to `caches`, and the routers' choices recorded. The rotary table must
        reach all positions.
        """
        runtime, count = self._runtime, len(tokens)
        ids = torch.empty((len(self.layers), count, self._top_k), dtype=torch.int64)
        weights = torch.empty((len(self.layers), count, self._top_k), dtype=torch.float32)
        logits = torch.empty((count, self.vocabulary), dtype=torch.float32)
        rows = torch.empty((len(self.layers), count, self._hidden)) if runtime.sees_hidden else None

        def bring(place: int) -> None:
            runtime.bring(self.layers[place].moe_layer, ids[place], None if rows is None else rows[place])

        def arrive(place: int) -> None:
            runtime.arrive(self.layers[place].moe_layer, ids[place])

        self._native.step(
            sequences=describe_sequences(self.rotary, sequences),
            caches=[describe_cache(cache) for cache in caches],
            words=[runtime.words(layer.moe_layer) for layer in self.layers],
            tokens=tokens.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            logits=logits.data_ptr(),
            threads=thread_count(),
            router_rows=0 if rows is None else rows.data_ptr(),
            routed=bring if runtime.cache else None,
            arrive=arrive if runtime.cache else None,
        )
        if runtime.listens:
            for place, layer in enumerate(self.layers):
                runtime.record(layer.moe_layer, ids[place], weights[place], None if rows is None else rows[place])
        return logits


def describe_sequences(rotary: RotaryTable, sequences: Sequences) -> tuple[int, int, int, int, int, int]:
    """The form that the native call takes; what it points to must stay alive until the call."""
    cosine, sine = rotary.cosine.data_ptr(), rotary.sine.data_ptr()
    positions, slots, pasts = sequences
    return cosine, sine, positions.data_ptr(), slots.data_ptr(), pasts.data_ptr(), len(positions)


def describe_cache(cache: Cache) -> tuple[int, ...]:
    """The form that the native call takes."""
    slot_stride, head_stride = cache.keys.stride()[:2]
    scales = (0 if each is None else each.data_ptr() for each in (cache.key_scales, cache.value_scales))
    form = KV_FORMATS.index(cache.keys.dtype)
    return cache.keys.data_ptr(), cache.values.data_ptr(), slot_stride, head_stride, form, *scales
