"""The kernel protocol, and the registry it is chosen from once at start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from dynaexq.core import ExpertShape, Handle, ModelShape, OptionError
from dynaexq.device import Arena
from dynaexq.formats import ExpertFormat, ExpertWeights
from dynaexq.kernels.gates import GateFunction

KERNELS = ("native", "reference")
ACTIVATIONS = ("int8", "fp32")
"""How activations meet quantised weights: rounded by groups, or as they are."""


@dataclass(frozen=True, eq=False)
class LayerFunctions:
    """What a family does between the matrices of an expert.

    `gate` maps [tokens, 2 * intermediate] (gate rows then up rows, or alternating when `interleaved`) to
    [tokens, intermediate]. Biases are [experts, 2 * intermediate] and [experts, hidden], None where absent.
    `native_gate` names a gate of the native kernels that computes the same; None: only the reference kernel can do it.
    """

    gate: Callable[[torch.Tensor], torch.Tensor]
    interleaved: bool
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    native_gate: GateFunction | None = None


@dataclass(frozen=True)
class ExpertsCall:
    """One MoE layer's work: hidden [tokens, hidden], ids and weights [tokens, top_k], words [experts].

    `arrive`: some words may point nowhere until it was called; None: all point to their experts.
    """

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    words: np.ndarray[Any, np.dtype[np.uint64]]
    functions: LayerFunctions
    arrive: Callable[[], None] | None = None


class VersionMemory(Protocol):
    """Where a kernel finds the version behind a handle."""

    formats: list[ExpertFormat]
    bases: list[int | None]
    shape: ModelShape
    arena: Arena

    @property
    def expert(self) -> ExpertShape:
        """Shape of every expert."""

    def weights(self, handle: Handle) -> ExpertWeights:
        """Plain float32 weights of a version."""


class ExpertsKernel(Protocol):
    """Computes a layer's experts through handle words."""

    name: str
    activations: str
    instructions: str
    fallback: str | None
    """Why layers go through the reference kernel instead; None: they do not."""

    def forward(self, call: ExpertsCall) -> torch.Tensor:
        """Weighted sum over each token's experts, [tokens, hidden] in hidden's dtype."""


def check_kernel(name: str, activations: str) -> None:
    """Raise OptionError for a kernel or an activation mode that is unknown, or a mode the kernel does not have."""
    if name not in KERNELS:
        raise OptionError(f"unknown kernel '{name}'; known kernels are {', '.join(KERNELS)}")
    if activations not in ACTIVATIONS:
        raise OptionError(f"unknown activations '{activations}'; known are {', '.join(ACTIVATIONS)}")


def make_kernel(name: str, memory: VersionMemory, activations: str = "int8") -> ExpertsKernel:
    """The kernel called `name` over `memory`; the reference does not round activations, whatever they are called.

    Raises:
        OptionError: an unknown name or mode.
    """
    from dynaexq.kernels.native import NativeKernel  # noqa: PLC0415 (the registry is the only importer)
    from dynaexq.kernels.reference import ReferenceKernel  # noqa: PLC0415

    check_kernel(name, activations)
    return NativeKernel(memory, activations) if name == "native" else ReferenceKernel(memory)
