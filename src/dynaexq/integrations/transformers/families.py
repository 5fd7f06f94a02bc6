"""Which modules of a model are its experts, and whether all of its experts can be served."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dynaexq.core import ExpertShape, ModelShape, UnsupportedModelError

VERIFIED_FAMILIES = {
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "jamba",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
}
"""Model types whose logits are compared with plain Transformers in the test suite."""

TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
WEIGHTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class ExpertLayers:
    """The experts modules of a model by name, in layer order, and the geometry they share."""

    modules: dict[str, Any]
    shape: ModelShape

    @property
    def parameter_names(self) -> set[str]:
        """Names of the expert weight parameters."""
        return {f"{name}.{weight}" for name in self.modules for weight in WEIGHTS}


def find_expert_layers(model: nn.Module) -> ExpertLayers:
    """Find every experts module of `model` (a meta skeleton will do).

    Raises:
        UnsupportedModelError: dense, or with experts that DynaExq cannot serve.
    """
    config: Any = model.config
    family = config.model_type
    modules = {name: module for name, module in model.named_modules() if _is_dispatched(module)}
    names = {f"{name}.{weight}" for name in modules for weight in WEIGHTS}
    left_over = [n for n, p in model.named_parameters() if "expert" in n and p.ndim == 3 and n not in names]
    if not modules:
        if left_over or _expert_count(config):
            raise UnsupportedModelError(
                f"the experts of model family '{family}' do not go through Transformers' experts interface, so they "
                f"cannot be served; verified families are {', '.join(sorted(VERIFIED_FAMILIES - {'qwen3_5_moe_text'}))}"
            )
        raise UnsupportedModelError(f"'{family}' is a dense model without experts; DynaExq needs a Mixture-of-Experts")
    if left_over:
        raise UnsupportedModelError(f"model family '{family}': {left_over[0]} would be left out; it cannot be served")
    _check_routing(config.get_text_config(), family, modules)
    if family not in VERIFIED_FAMILIES:
        warnings.warn(f"model family '{family}' has not been verified against plain Transformers", stacklevel=2)
    shapes = {_geometry(name, module, family) for name, module in modules.items()}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"model family '{family}': experts of several shapes {sorted(map(str, shapes))}")
    experts, expert = shapes.pop()
    return ExpertLayers(modules, ModelShape(len(modules), experts, expert))


def expert_matrices(module: Any, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gate, up and down of one expert from tensors in the module's own layout."""
    if module.is_transposed:
        gate_up, down = gate_up.t(), down.t()
    gate, up = gate_up.chunk(2) if module.is_concatenated else (gate_up[::2], gate_up[1::2])
    return gate, up, down


def _is_dispatched(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("is_transposed", "is_concatenated", "has_gate", "_apply_gate"))


def top_k_of(config: Any) -> int:
    """How many experts of a layer a token chooses."""
    text = config.get_text_config()
    found = [top_k for name in TOP_K if isinstance(top_k := getattr(text, name, None), int)]
    return max(found, default=1)


def _check_routing(config: Any, family: str, modules: dict[str, Any]) -> None:
    experts = min(int(module.num_experts) for module in modules.values())
    for name in TOP_K:
        top_k = getattr(config, name, None)
        if isinstance(top_k, int) and not 1 <= top_k <= experts:
            raise UnsupportedModelError(f"model family '{family}': {name} is {top_k}, with {experts} experts")


def _expert_count(config: Any) -> int:
    text = config.get_text_config()
    return max(int(getattr(text, name, None) or 0) for name in EXPERT_COUNTS)


def _geometry(name: str, module: Any, family: str) -> tuple[int, ExpertShape]:
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):  # a flag newer than 5.19
        what = "have no gate" if not module.has_gate else "are normalised one by one"
        raise UnsupportedModelError(f"model family '{family}': its experts {what}, which is not supported ({name})")
    experts, *gate_up = module.gate_up_proj.shape
    rows, hidden = reversed(gate_up) if module.is_transposed else gate_up
    return int(experts), ExpertShape(int(hidden), int(rows) // 2)
