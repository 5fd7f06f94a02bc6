"""Decode steps of a whole model in one native call, where model and layers are of the common form.

At one token a sequence, Transformers' sixty small operations a layer cost as much time as the weights they stand
between, for streaming the weights sweeps their code and data out of the processor's caches. A model is taken over only
if, on a trial at load, each layer's native form gave the same numbers as the layer itself, and the model did nothing
but embed, rotate, go through its layers, normalise and multiply with its head; and only for steps that need nothing
else: one token a sequence, no mask, RoomyLayer caches, nobody watching the inside. All other calls go the usual way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dynaexq.integrations.transformers.cache import RoomyLayer, cache_argument, make_cache
from dynaexq.integrations.transformers.decoder_parts import NativeLayer, UnfitLayerError, children
from dynaexq.integrations.transformers.native_decoder import (
    Cache,
    NativeDecoder,
    RotaryTable,
    Sequences,
    describe_cache,
    describe_sequences,
)
from dynaexq.kernels.threads import thread_count

TRIAL_PAST, TRIAL_SEQUENCES = 5, 2
TOLERANCE = 0.02
"""Relative: the last bits of attention differ, and where they tip the rounding of an activation, a step of it shows
(0.2 % at 8 bits). A layer of another form is off by its whole size."""

MODEL_PARTS, DECODER_PARTS = {"model", "lm_head"}, {"embed_tokens", "layers", "norm", "rotary_emb"}
KNOWN_ARGUMENTS = {"input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict"}
SHOWN_INSIDE = ("output_attentions", "output_hidden_states", "output_router_logits")


class FastModel:
    """A causal language model whose decode steps are native where they can be."""

    def __init__(self, model: Any, decoder: NativeDecoder, argument: str, result: Callable[..., Any]) -> None:
        """`argument` is what the model calls its cache, `result` the type it returns."""
        self.decoder = decoder
        self._config, self._argument, self._result = model.config, argument, result
        self._known = KNOWN_ARGUMENTS | {argument}
        self._forward = model.forward

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """One call of the model."""
        if arguments and "input_ids" not in named:
            named["input_ids"], *rest = arguments
            arguments = tuple(rest)
        layers = self._cache_layers(arguments, named)
        if layers is None:
            return self._forward(*arguments, **named)
        ids, position_ids = named["input_ids"], named.get("position_ids")
        count, past = ids.shape[0], layers[0].get_seq_length()
        slots, pasts = torch.arange(count, dtype=torch.int32), torch.full((count,), past, dtype=torch.int32)
        positions = pasts
        if position_ids is not None:
            positions = position_ids.to(torch.int32).expand(count, 1).contiguous().view(-1)
            past = max(past, int(positions.max()))
        self.decoder.rotary.reach(past + 1)
        places = [layer.append_one() for layer in layers]
        caches = [Cache(place.keys, place.values) for place in places]
        logits = self.decoder.step(ids.contiguous().view(-1), Sequences(positions, slots, pasts), caches)
        return self._result(logits=logits.unsqueeze(1), **{self._argument: named[self._argument]})

    def _cache_layers(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> list[RoomyLayer] | None:
        """The cache of a call that a native step can answer; None for all others."""
        ids, mask, cache = named.get("input_ids"), named.get("attention_mask"), named.get(self._argument)
        if (
            ids is None
            or ids.shape[1] != 1
            or ids.shape[0] == 0
            or arguments
            or cache is None
            or any(value is not None and value is not False for name, value in named.items() if name not in self._known)
            or named.get("return_dict") is False
            or any(getattr(self._config, name, False) for name in SHOWN_INSIDE)
            or (mask is not None and (mask.ndim != 2 or not bool(mask.all())))
            or not self.decoder.can_step(ids.shape[0])
        ):
            return None
        layers = [cache.layers[layer.index] for layer in self.decoder.layers]
        if any(type(layer) is not RoomyLayer or not layer.get_seq_length() for layer in layers):
            return None
        return layers


def speed_up_decoding(model: Any, layers: int) -> FastModel | None:
    """Give a loaded model of `layers` MoE layers native decode steps where a trial proves them; None elsewhere."""
    decoder = model.base_model
    parts = list(getattr(decoder, "layers", None) or [])
    if len(parts) != layers or children(model) != MODEL_PARTS or children(decoder) != DECODER_PARTS:
        return None
    argument = cache_argument(model)
    try:
        native = [NativeLayer(layer) for layer in parts]
        whole = NativeDecoder(decoder, model.lm_head, native)
        whole.rotary.reach(TRIAL_PAST + 1)
        with native[0].runtime.trial(), torch.no_grad():
            for layer, step in zip(parts, native, strict=True):
                if not _agrees(model, layer, step, whole.rotary, argument):
                    return None
            result = _find_result_type(model, whole.rotary, argument)
    except (UnfitLayerError, AttributeError, TypeError, ValueError):
        return None
    fast = FastModel(model, whole, argument, result)

    @functools.wraps(model.forward)  # callers look at its signature
    def forward(*arguments: Any, **named: Any) -> Any:
        return fast.forward(*arguments, **named)

    model.forward = forward
    return fast


def _agrees(model: Any, layer: nn.Module, fast: NativeLayer, rotary: RotaryTable, argument: str) -> bool:
    """Whether the native step does what the layer does, for sequences with some tokens behind them."""
    generator = torch.Generator().manual_seed(0)
    width = model.config.get_text_config().hidden_size
    tokens = torch.randn(TRIAL_SEQUENCES, TRIAL_PAST + 1, width, generator=generator)
    places = torch.arange(TRIAL_PAST + 1).unsqueeze(0)

    def call(part: slice, cache: Any) -> torch.Tensor:
        given = {
            "attention_mask": None,
            "position_ids": places[:, part],
            argument: cache,
            "use_cache": True,
            "position_embeddings": (rotary.cosine[part].unsqueeze(0), rotary.sine[part].unsqueeze(0)),
        }
        result: torch.Tensor = layer(tokens[:, part], **given)
        return result

    def step(part: slice, cache: Any) -> torch.Tensor:
        place = cache.layers[fast.index].append_one()
        slots = torch.arange(TRIAL_SEQUENCES, dtype=torch.int32)
        pasts = torch.full((TRIAL_SEQUENCES,), TRIAL_PAST, dtype=torch.int32)
        ids = torch.empty((TRIAL_SEQUENCES, fast.top_k), dtype=torch.int64)
        weights = torch.empty((TRIAL_SEQUENCES, fast.top_k), dtype=torch.float32)
        hidden = tokens[:, part].contiguous()
        out = torch.empty_like(hidden)
        fast.native.step(
            sequences=describe_sequences(rotary, Sequences(pasts, slots, pasts)),
            cache=describe_cache(Cache(place.keys, place.values)),
            words=fast.runtime.words(fast.moe_layer),
            hidden=hidden.data_ptr(),
            ids=ids.data_ptr(),
            weights=weights.data_ptr(),
            out=out.data_ptr(),
            threads=thread_count(),
            routed=lambda _: fast.runtime.bring(fast.moe_layer, ids, None),
            arrive=lambda _: fast.runtime.arrive(fast.moe_layer, ids),
        )
        return out

    results = []
    for last in (call, step):
        cache = make_cache(model.config, TRIAL_PAST + 1)
        call(slice(0, TRIAL_PAST), cache)
        result = last(slice(TRIAL_PAST, TRIAL_PAST + 1), cache)
        results.append((result, cache.layers[fast.index].keys, cache.layers[fast.index].values))
    return all((a - b).norm() <= TOLERANCE * a.norm() for a, b in zip(*results, strict=True))


def _find_result_type(model: Any, rotary: RotaryTable, argument: str) -> Callable[..., Any]:
    """What a model returns; UnfitLayerError if it does more than embed, rotate, go through its layers, normalise and
    multiply with its head.

    Its layers are replaced for one call by one that only changes numbers and keeps what it was given.
    """
    given: list[Any] = []

    def stand_in(hidden: torch.Tensor, *_: Any, **named: Any) -> torch.Tensor:
        given.append(named.get("position_embeddings"))
        return hidden * -0.5 + 1.0

    decoder, ids = model.base_model, torch.arange(3).unsqueeze(0)
    try:
        for layer in decoder.layers:
            layer.forward = stand_in
        result = model(input_ids=ids, **{argument: make_cache(model.config, 3)}, use_cache=True)
    finally:
        for layer in decoder.layers:
            del layer.forward
    hidden = decoder.embed_tokens(ids)
    for _ in decoder.layers:
        hidden = stand_in(hidden)
    expected = model.lm_head(decoder.norm(hidden))
    cosine, sine = rotary.cosine[:3].unsqueeze(0), rotary.sine[:3].unsqueeze(0)
    if not all(torch.equal(each[0], cosine) and torch.equal(each[1], sine) for each in given[: len(decoder.layers)]):
        raise UnfitLayerError("positions are not the rotary embedding's")
    if set(result.keys()) != {"logits", argument} or not torch.equal(result.logits, expected):
        raise UnfitLayerError("the model does more than go through its layers")
    return type(result)
