"""A model of a public geometry with random weights: which tensors it has, and how large each one's weights are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dynaexq.core import ModelShape, OptionError
from dynaexq.integrations.transformers.families import ExpertLayers, find_expert_layers
from dynaexq.integrations.transformers.geometries import geometry_options, make_config
from dynaexq.store.noise import Floats, RandomTensor, open_stream
from dynaexq.store.routing import fit_biases, profile_shares, zipf_shares
from dynaexq.store.synthetic import SyntheticModel
from dynaexq.store.writer import COPIED_SUFFIXES, QUANT_METHOD

ROUTINGS = ("uniform", "zipf")
RESIDUAL_WRITERS = ("o_proj", "out_proj", "down_proj")
"""Last names of the layers whose outputs are added to the residual stream."""

CONSTANT = 8.0
"""Coordinate 0 of every embedding: it outlasts all layers, so a router that reads it has a bias.

Other dense matrices do not read it: what they made of it would be common to all tokens, and bias later routers.
"""

UNKNOWN_TOKEN = -16.0
"""The output layer's weight on the constant for tokens that the tokenizer does not know: they are never chosen."""

ROUTING_STREAM = 2


def describe_random_model(
    geometry: str, tokenizer: Path, routing: str | Floats = "uniform", seed: int = 0, **overrides: Any
) -> SyntheticModel:
    """The model of `geometry` with random weights and the tokenizer of the model directory `tokenizer`.

    Args:
        routing: `uniform`, `zipf`, or hotness [layers, experts] that traffic is to follow; its layers repeat.
        overrides: other values for keyword arguments of the geometry's configuration.

    Raises:
        OptionError: unknown geometry or routing, a vocabulary smaller than the tokenizer's, no MoE layer, hotness of
            another number of experts, or routing that the family's routers cannot be given.
    """
    options = geometry_options(geometry, **overrides)
    known = int(json.loads((tokenizer / "config.json").read_text())["vocab_size"])
    if options["vocab_size"] < known:
        raise OptionError(
            f"a vocabulary of {options['vocab_size']} is below the {known} of the tokenizer it comes with"
        )
    dense = options.get("first_k_dense_replace", 0)
    if options["num_hidden_layers"] <= dense:
        raise OptionError(f"the first {dense} layers of {geometry} have no experts; give more --layers")
    config = make_config(options)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    layers = find_expert_layers(skeleton)
    biases = None if isinstance(routing, str) and routing == "uniform" else _biases(skeleton, layers, routing, seed)
    recipe = {"options": options, "routing": routing if isinstance(routing, str) else _digest(routing)}
    return SyntheticModel(
        name=geometry,
        model_type=str(config.model_type),
        layer_names=list(layers.modules),
        shape=layers.shape,
        depth=int(config.num_hidden_layers),
        seed=seed,
        tensors=_tensors(skeleton, layers, biases, known),
        files={**_tokenizer_files(tokenizer), "config.json": _config_text(skeleton)},
        recipe=recipe,
    )


def target_shares(shape: ModelShape, routing: str | Floats, seed: int) -> Floats:
    """Shares of traffic [layers, experts] that `routing` asks for.

    Raises:
        OptionError: unknown routing, or hotness of another number of experts.
    """
    if isinstance(routing, str):
        if routing not in ROUTINGS:
            raise OptionError(f"unknown routing '{routing}'; give {' or '.join(ROUTINGS)}, or a profile")
        if routing == "uniform":
            return np.full((shape.layers, shape.experts), 1 / shape.experts)
        return zipf_shares(shape.layers, shape.experts, np.random.Generator(open_stream(seed, ROUTING_STREAM, 0)))
    if routing.shape[1] != shape.experts:
        raise OptionError(
            f"the profile is of a model with {routing.shape[1]} experts a layer, this one has {shape.experts}"
        )
    return profile_shares(routing, shape.layers)


def _biases(skeleton: Any, layers: ExpertLayers, routing: str | Floats, seed: int) -> Floats:
    """What each router adds to its logits, [layers, experts]."""
    shares = target_shares(layers.shape, routing, seed)
    config = skeleton.config
    limited = getattr(config, "topk_method", None) not in (None, "greedy") or any(
        "correction" in name for name, _ in (*skeleton.named_buffers(), *skeleton.named_parameters())
    )
    if limited or any(_router_of(skeleton, name, layers) is None for name in layers.modules):
        raise OptionError(
            f"--routing {routing if isinstance(routing, str) else 'with a profile'} is not supported for the routers "
            f"of family '{config.model_type}'; use --routing uniform"
        )
    return fit_biases(
        shares, int(config.num_experts_per_tok), np.random.Generator(open_stream(seed, ROUTING_STREAM, 1))
    )


def _router_of(skeleton: Any, experts_name: str, layers: ExpertLayers) -> str | None:
    """Name of the weight [experts, hidden] of the router beside an experts module."""
    parent = experts_name.rpartition(".")[0]
    wanted = (layers.shape.experts, layers.shape.expert.hidden)
    found = [
        f"{parent}.{name}.weight"
        for name, child in skeleton.get_submodule(parent).named_children()
        if tuple(getattr(getattr(child, "weight", None), "shape", ())) == wanted
    ]
    return found[0] if len(found) == 1 else None


def _tensors(skeleton: Any, layers: ExpertLayers, biases: Floats | None, known: int) -> dict[str, RandomTensor]:
    """Every tensor that is no expert weight, tied ones once."""
    hidden = layers.shape.expert.hidden
    normed = CONSTANT / (1 + (CONSTANT**2 - 1) / hidden) ** 0.5  # the constant as routers see it, after RMSNorm
    routers = {_router_of(skeleton, name, layers): layer for layer, name in enumerate(layers.modules)}
    left_out = layers.parameter_names | set(getattr(skeleton, "all_tied_weights_keys", None) or {})
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    tensors = {}
    for name, value in skeleton.state_dict().items():
        if name in left_out:
            continue
        shape = tuple(value.shape)
        if name not in parameters:
            tensors[name] = RandomTensor(shape, dtype=_dtype_name(value.dtype))
        elif name in routers:
            first = np.zeros(shape[0]) if biases is None else biases[routers[name]] / normed
            tensors[name] = RandomTensor(shape, hidden**-0.5, first=first)
        else:
            tensors[name] = _parameter(skeleton, name, shape, known)
    return tensors


def _parameter(skeleton: Any, name: str, shape: tuple[int, ...], known: int) -> RandomTensor:
    place, _, last = name.rpartition(".")
    module = skeleton.get_submodule(place)
    if len(shape) < 2 or last.endswith("bias"):
        is_norm = last == "weight" and "Norm" in type(module).__name__
        return RandomTensor(shape, fill=_initial_weight(module) if is_norm else 0.0)
    if isinstance(module, nn.Embedding):
        return RandomTensor(shape, 1.0, first=np.full(shape[0], CONSTANT))
    std = float(np.prod(shape[1:])) ** -0.5
    if module is skeleton.get_output_embeddings():
        return RandomTensor(shape, std, first=np.where(np.arange(shape[0]) < known, 0.0, UNKNOWN_TOKEN))
    if place.rpartition(".")[2] in RESIDUAL_WRITERS:
        return RandomTensor(shape, std * (2 * skeleton.config.num_hidden_layers) ** -0.5)
    reads_residual = shape[1:] == (skeleton.config.hidden_size,)
    return RandomTensor(shape, std, first=np.zeros(shape[0]) if reads_residual else None)


def _initial_weight(norm: Any) -> float:
    """What weights of this norm's class begin as: 1, or 0 where the class adds 1 itself."""
    with torch.device("cpu"):
        return float(type(norm)(1).weight.detach()[0])


def _dtype_name(dtype: torch.dtype) -> str:
    names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
    return names[dtype]


def _config_text(skeleton: Any) -> bytes:
    config = json.loads(skeleton.config.to_json_string())
    config |= {
        "architectures": [type(skeleton).__name__],
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": QUANT_METHOD},
    }
    return json.dumps(config, indent=2).encode()


def _tokenizer_files(root: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in sorted(root.iterdir())
        if path.suffix in COPIED_SUFFIXES and path.name != "config.json" and path.is_file()
    }


def _digest(hotness: Floats) -> str:
    return hashlib.blake2b(np.ascontiguousarray(hotness).tobytes(), digest_size=16).hexdigest()
