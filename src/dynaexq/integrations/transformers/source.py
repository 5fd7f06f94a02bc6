"""Experts of a checkpoint, one at a time, through Transformers' own conversion mapping.

No key names of any family are written here: the mapping says which tensors of the file make up which
parameter, and its operations are run on one expert's tensors instead of on a whole layer's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from dynaexq.core import CheckpointError, ExpertKey, ModelShape
from dynaexq.device.base import Bytes
from dynaexq.formats import ExpertFormat, ExpertWeights, encode, tier_format
from dynaexq.integrations.transformers.experts import layer_functions
from dynaexq.integrations.transformers.families import WEIGHTS, ExpertLayers, expert_matrices
from dynaexq.kernels import LayerFunctions
from dynaexq.store import Checkpoint
from dynaexq.store.sensitivity import Sensitivity


class KeyMap:
    """Which parameter every tensor of a checkpoint belongs to."""

    def __init__(self, model: Any, names: list[str]) -> None:
        conversions = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._model = model
        self.by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}
        parameters = dict(model.state_dict())
        self.parameters = set(parameters)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        self.sources: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in sorted(names, key=dot_natural_key):
            target, pattern = rename_source_key(
                name, self._renamings, self._converters, model.base_model_prefix, parameters
            )
            if target not in parameters and name in parameters:
                target, pattern = name, None
            self.sources[target][pattern].append(name)

    def missing(self, exempt: set[str]) -> list[str]:
        """Parameters that no tensor provides, apart from `exempt` and those Transformers may leave out."""
        provided = set(self.sources)
        for sources in self.sources.values():
            for pattern in sources:
                if pattern is not None:
                    provided |= self._siblings(pattern)
        tied = dict(getattr(self._model, "all_tied_weights_keys", None) or {})
        ignored = [re.compile(text) for text in self._model._keys_to_ignore_on_load_missing or ()]
        return sorted(
            name
            for name in self.parameters - provided - exempt
            if not (name in tied and tied[name] in provided)
            and not (name in tied.values() and any(tied[k] == name and k in provided for k in tied))
            and not any(pattern.search(name) for pattern in ignored)
        )

    def _siblings(self, pattern: str) -> set[str]:
        """All targets of a converter that splits one tensor into several parameters."""
        targets = self.by_pattern[pattern].target_patterns
        return {
            name.replace(targets[0], other)
            for name in self.sources
            if targets[0] in name and pattern in self.sources[name]
            for other in targets[1:]
        }


class CheckpointExperts:
    """An expert source over a checkpoint (see store.ExpertSource), for a model skeleton with its experts in place."""

    def __init__(self, model: nn.Module, layers: ExpertLayers, checkpoint: Checkpoint) -> None:
        """Map every tensor and check that each expert weight is there exactly once.

        Raises:
            CheckpointError: expert or dense weights are missing or surplus.
        """
        self.checkpoint = checkpoint
        self.shape: ModelShape = layers.shape
        self.layer_names = list(layers.modules)
        self._model = model
        self._layers = layers
        self._keys = KeyMap(model, list(checkpoint.tensors))
        self._patterns = {name: self._check_sources(name) for name in sorted(layers.parameter_names)}
        experts = {k for name in self._patterns for ks in self._keys.sources[name].values() for k in ks}
        mapped = {k for name in self._keys.parameters for ks in self._keys.sources.get(name, {}).values() for k in ks}
        self.dense_names = sorted(mapped - experts)
        self.unused_names = sorted(set(checkpoint.tensors) - mapped)
        missing = self._keys.missing(layers.parameter_names)
        if missing:
            raise CheckpointError(f"{checkpoint.root} has no weights for {missing[0]} ({len(missing)} missing in all)")
        self._check_dense_shapes(layers.parameter_names)
        self.read(ExpertKey(0, 0))  # a wrong geometry shows before anything is made of it

    def read(self, key: ExpertKey) -> ExpertWeights:
        """Weights of one expert in the checkpoint's dtype. Raises CheckpointError."""
        name = self.layer_names[key.layer]
        gate_up, down = (self._read_parameter(f"{name}.{weight}", key.expert) for weight in WEIGHTS)
        weights = ExpertWeights(*expert_matrices(self._layers.modules[name], gate_up, down))
        expert = self.shape.expert
        shapes = [(expert.intermediate, expert.hidden)] * 2 + [(expert.hidden, expert.intermediate)]
        for part, matrix, shape in zip(weights._fields, weights, shapes, strict=True):
            if tuple(matrix.shape) != shape:
                raise CheckpointError(
                    f"{self.checkpoint.root}: {part} of expert {key.expert} in {name} has shape {list(matrix.shape)}, "
                    f"the configuration says {list(shape)}"
                )
        return weights

    def read_functions(self, layer: int) -> LayerFunctions:
        """What the experts of a layer do between their matrices. Raises CheckpointError."""
        name = self.layer_names[layer]
        module = self._layers.modules[name]
        biases: list[torch.Tensor | None] = [None, None]
        if module.has_bias:
            sources = [self._keys.sources[f"{name}.{weight}_bias"][None][0] for weight in WEIGHTS]
            biases = [self.checkpoint.read(source) for source in sources]
        return layer_functions(module, self.shape.expert.intermediate, *biases)

    def _check_dense_shapes(self, experts: set[str]) -> None:
        """Tensors taken as they are must have the parameter's shape (Transformers checks the converted ones)."""
        for target in sorted(self._keys.parameters - experts):
            for name in self._keys.sources.get(target, {}).get(None, []):
                found = self.checkpoint.tensors[name].shape
                if found != self._keys.shapes[target]:
                    raise CheckpointError(
                        f"tensor {name} in {self.checkpoint.tensors[name].file} has shape {list(found)}, "
                        f"the configuration says {list(self._keys.shapes[target])}"
                    )

    def _read_parameter(self, name: str, expert: int) -> torch.Tensor:
        sources = self._keys.sources[name]
        pattern = self._patterns[name]
        if pattern is None:
            return self.checkpoint.read(sources[None][0], expert)
        converter = self._keys.by_pattern[pattern]
        tensors: dict[str, Any] = {str(each): [self.checkpoint.read(names[expert])] for each, names in sources.items()}
        try:
            for operation in converter.operations:
                tensors = operation.convert(
                    tensors,
                    source_patterns=converter.source_patterns,
                    target_patterns=converter.target_patterns,
                    full_layer_name=name,
                    model=self._model,
                    config=self._model.config,
                )
        except (RuntimeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{self.checkpoint.root}: expert {expert} of {name} does not fit: {error}") from error
        (result,) = tensors.values()
        tensor: torch.Tensor = result[0]
        return tensor

    def _check_sources(self, name: str) -> str | None:
        """The converter pattern of parameter `name` (None: stored fused), after checking its tensors."""
        sources = self._keys.sources.get(name)
        if not sources:
            raise CheckpointError(f"{self.checkpoint.root} has no weights for {name}")
        if None in sources:
            if len(sources) > 1 or len(sources[None]) > 1:
                raise CheckpointError(f"{self.checkpoint.root} holds {name} more than once")
            shape = self.checkpoint.tensors[sources[None][0]].shape
            if len(shape) != 3 or shape[0] != self.shape.experts:
                raise CheckpointError(f"{sources[None][0]} has shape {list(shape)}, not {self.shape.experts} experts")
            return None
        patterns = [pattern for pattern in sources if pattern is not None]
        converter = self._keys.by_pattern[patterns[0]]
        for pattern in converter.source_patterns:
            names = sources.get(pattern, [])
            _check_numbering(names, self.shape.experts, f"{self.checkpoint.root}: {name} ({pattern})")
        return patterns[0]


class QuantisingExperts:
    """A version source that quantises a checkpoint's experts on the way (see residency.VersionSource)."""

    sensitivity: Sensitivity | None = None

    def __init__(self, experts: CheckpointExperts, group_size: int, quantizer: str) -> None:
        self.shape = experts.shape
        self._experts = experts
        self._group_size = group_size
        self._quantizer = quantizer

    @property
    def fingerprint(self) -> str:
        """Of the checkpoint."""
        return self._experts.checkpoint.fingerprint()

    def format(self, tier: str) -> ExpertFormat:
        """Format of a tier at the chosen group size."""
        return tier_format(tier, self._group_size)

    def require_tier(self, tier: str) -> None:
        """Every tier can be made."""

    def read_into(self, key: ExpertKey, tier: str, destination: Bytes) -> None:
        """Encode one expert into `destination`. Raises CheckpointError."""
        version = encode(self._experts.read(key), self.format(tier), self.shape.expert, self._quantizer)
        destination[:] = version.block.numpy()

    def missing_files(self) -> list[str]:
        """Shards that are gone."""
        files = {tensor.file for tensor in self._experts.checkpoint.tensors.values()}
        return sorted(str(file) for file in files if not file.exists())

    def close(self) -> None:
        """Close the checkpoint's files."""
        self._experts.checkpoint.close()


def _check_numbering(names: list[str], experts: int, what: str) -> None:
    """Raise CheckpointError unless `names` differ in one number alone, which counts the experts from 0."""
    if len(names) != experts:
        raise CheckpointError(f"{what}: {len(names)} tensors for {experts} experts")
    parts = [name.split(".") for name in names]
    if len({len(part) for part in parts}) > 1:
        raise CheckpointError(f"{what}: tensor names of different forms, such as {names[0]} and {names[-1]}")
    columns = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    if experts > 1 and columns != [tuple(map(str, range(experts)))]:
        raise CheckpointError(f"{what}: tensor names do not count the experts from 0 to {experts - 1}")
