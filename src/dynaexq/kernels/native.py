"""The native kernel: one call into C++ per layer, straight on the versions behind a window's handles."""

from __future__ import annotations

import warnings

import torch

from dynaexq.formats import VersionLayout
from dynaexq.kernels.base import ACTIVATIONS, ExpertsCall, LayerFunctions, VersionMemory
from dynaexq.kernels.reference import ReferenceKernel
from dynaexq.kernels.threads import thread_count
from dynaexq.native import ExpertLayers, LayerGate, instruction_sets

NATIVE_DTYPES = (torch.float32, torch.bfloat16)


class NativeKernel:
    """Experts in C++ (native/kernels), for every format; gates it does not have go to the reference, with a warning.

    Activations `int8` are rounded by groups: to 8 bits where weights have up to 4, to 16 bits where weights have 8
    (with 8 bits, activations would lose more than such weights do); bf16 weights meet float32. `fp32` rounds nothing.
    A token's result does not depend on its batch or on the number of threads, to the last bit.
    """

    name = "native"

    def __init__(self, memory: VersionMemory, activations: str, instructions: str | None = None) -> None:
        """`instructions`: an instruction set of this processor, default the best.

        Raises:
            ValueError: there is no kernel for a format or shape of `memory`.
        """
        assert activations in ACTIVATIONS
        self.activations = activations
        self.instructions = instructions or instruction_sets()[0]
        self.fallback: str | None = None
        self._memory = memory
        self._reference = ReferenceKernel(memory)
        self._gates: dict[LayerFunctions, tuple[LayerGate, tuple[torch.Tensor | None, ...]] | None] = {}
        shape = memory.expert
        layouts = [VersionLayout.of(fmt, shape) for fmt in memory.formats]
        sections = [(layout.gate.offset, layout.up.offset, layout.down.offset) for layout in layouts]
        formats = [
            (fmt.bits, fmt.group_size, fmt.base_bits, own, (0, 0, 0) if base is None else sections[base], fmt.down_bits)
            for fmt, own, base in zip(memory.formats, sections, memory.bases, strict=True)
        ]
        arena = memory.arena.view(0, memory.arena.nbytes)
        self.layers = ExpertLayers(
            arena=arena.data_ptr(),
            arena_bytes=arena.nbytes,
            experts=memory.shape.experts,
            hidden=shape.hidden,
            intermediate=shape.intermediate,
            formats=formats,
            exact=activations == "fp32",
            instructions=self.instructions,
        )

    def forward(self, call: ExpertsCall) -> torch.Tensor:
        """Weighted sum over each token's experts, [tokens, hidden] in hidden's dtype.

        Raises:
            IndexError: an expert id outside of the layer.
        """
        gate = self.native_gate(call.functions)
        if gate is None:
            return self._reference.forward(call)
        dtype = call.hidden.dtype if call.hidden.dtype in NATIVE_DTYPES else torch.float32
        hidden = call.hidden.to(dtype).contiguous()
        ids, weights = call.ids.to(torch.int64).contiguous(), call.weights.to(torch.float32).contiguous()
        out = torch.empty(hidden.shape, dtype=dtype)
        tokens, top_k = ids.shape
        assert hidden.shape == (tokens, self._memory.expert.hidden) and weights.shape == ids.shape
        assert len(call.words) == self._memory.shape.experts
        self.layers.forward(
            gate,
            call.words,
            dtype == torch.bfloat16,
            hidden.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            tokens,
            top_k,
            out.data_ptr(),
            thread_count(),
            call.arrive,
        )
        return out.to(call.hidden.dtype)

    def native_gate(self, functions: LayerFunctions) -> LayerGate | None:
        """A layer's gate for C++, kept with the kernel; None where the reference must compute it."""
        if functions not in self._gates:
            self._gates[functions] = self._make_gate(functions)
        made = self._gates[functions]
        return None if made is None else made[0]

    def _make_gate(self, functions: LayerFunctions) -> tuple[LayerGate, tuple[torch.Tensor | None, ...]] | None:
        """The layer's gate for C++ and the tensors it points to; None where the reference must do it."""
        function = functions.native_gate
        if function is None:
            if self.fallback is None:
                self.fallback = "the family's gate function has no native form"
                warnings.warn(f"{self.fallback}: experts go through the reference kernel, which is slow", stacklevel=3)
            return None
        biases = tuple(
            None if bias is None else bias.detach().to(torch.float32).contiguous()
            for bias in (functions.gate_up_bias, functions.down_bias)
        )
        addresses = [0 if bias is None else bias.data_ptr() for bias in biases]
        gate = LayerGate(function.clamped, function.alpha, function.limit, functions.interleaved, *addresses)
        return gate, biases
