"""The experts implementation `dynaexq`: what a MoE layer calls instead of its own matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dynaexq.core import DynaExqError
from dynaexq.integrations.transformers.families import ExpertLayers
from dynaexq.kernels import LayerFunctions
from dynaexq.kernels.gates import GateFunction, recognise_gate
from dynaexq.runtime import ExpertRuntime

IMPLEMENTATION = "dynaexq"


@dataclass(frozen=True)
class LayerBinding:
    """Ties an experts module to its place in the runtime."""

    runtime: ExpertRuntime
    layer: int
    functions: LayerFunctions


def forward_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts of one layer: hidden [tokens, hidden], ids and weights [tokens, top_k] -> [tokens, hidden]."""
    binding: LayerBinding | None = getattr(module, "dynaexq", None)
    if binding is None:
        raise DynaExqError(
            "experts implementation 'dynaexq' was chosen for a model that was not loaded with a DynaExqConfig"
        )
    return binding.runtime.forward(binding.layer, binding.functions, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward_experts)


def _is_prefill(arguments: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether a forward call brings more than one new token per sequence: inputs are [batch, tokens, ...]."""
    inputs = named.get("input_ids", named.get("inputs_embeds"))
    if inputs is None:
        inputs = next((each for each in arguments if isinstance(each, torch.Tensor)), None)
    return inputs is None or inputs.shape[1] > 1


def _gates_of(module: Any) -> list[GateFunction]:
    """Native gates that a family's experts may have: SwiGLU, and gpt_oss's with the constants the module names."""
    gates = [GateFunction()]
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        gates.append(GateFunction(True, float(module.alpha), float(module.limit)))
    return gates


def layer_functions(
    module: Any, intermediate: int, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None
) -> LayerFunctions:
    """What an experts module does between its matrices."""
    interleaved = not module.is_concatenated
    native = recognise_gate(module._apply_gate, interleaved, intermediate, _gates_of(module))
    return LayerFunctions(module._apply_gate, interleaved, gate_up_bias, down_bias, native)


def bind_experts(model: Any, layers: ExpertLayers, runtime: ExpertRuntime) -> None:
    """Connect every experts module to `runtime`, and make each forward of the model one window."""
    for index, module in enumerate(layers.modules.values()):
        biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
        functions = layer_functions(module, layers.shape.expert.intermediate, *biases)
        module.dynaexq = LayerBinding(runtime, index, functions)
    model.dynaexq_runtime = runtime
    for part in {model, model.base_model}:
        part.register_forward_pre_hook(lambda _, *call: runtime.begin_window(_is_prefill(*call)), with_kwargs=True)
        part.register_forward_hook(lambda *_: runtime.end_window(), always_call=True)
