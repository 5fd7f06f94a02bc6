"""The kernel protocol, and the registry it is chosen from once at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from dynaexq.core import ExpertShape, Handle, OptionError
from dynaexq.formats import ExpertFormat


@dataclass(frozen=True)
class LayerFunctions:
    """What a family does between the matrices of an expert.

    `gate` maps [tokens, 2 * intermediate] (gate rows then up rows, or alternating when `interleaved`) to
    [tokens, intermediate]. Biases are [experts, 2 * intermediate] and [experts, hidden], None where absent.
    """

    gate: Callable[[torch.Tensor], torch.Tensor]
    interleaved: bool
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class ExpertsCall:
    """One MoE layer's work: hidden [tokens, hidden], ids and weights [tokens, top_k], words [experts]."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    words: np.ndarray[Any, np.dtype[np.uint64]]
    functions: LayerFunctions


class VersionMemory(Protocol):
    """Where a kernel finds the version behind a handle."""

    formats: list[ExpertFormat]

    @property
    def expert(self) -> ExpertShape:
        """Shape of every expert."""

    def block(self, handle: Handle) -> torch.Tensor:
        """The version's bytes, uint8 [extent_bytes]."""


class ExpertsKernel(Protocol):
    """Computes a layer's experts through handle words."""

    name: str

    def forward(self, call: ExpertsCall) -> torch.Tensor:
        """Weighted sum over each token's experts, [tokens, hidden] in hidden's dtype."""


def make_kernel(name: str, memory: VersionMemory) -> ExpertsKernel:
    """The kernel called `name` over `memory`. Raises OptionError for an unknown name."""
    from dynaexq.kernels.reference import ReferenceKernel  # noqa: PLC0415 (the registry is the only importer)

    kernels = {"reference": ReferenceKernel}
    if name not in kernels:
        raise OptionError(f"unknown kernel '{name}'; known kernels are {', '.join(kernels)}")
    return kernels[name](memory)
