"""RMSNorm in one native call: Transformers spells it in six torch operations, which cost more than the arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynaexq.kernels.threads import thread_count
from dynaexq.native import normalize_rows

PROBE_ROWS = 4
TOLERANCE = 1e-5


class NativeRMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + epsilon) * weight` over the last dimension, float32."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().to(torch.float32).contiguous(), requires_grad=False)
        self.variance_epsilon = epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        x = hidden_states.contiguous()
        out = torch.empty_like(x)
        width = self.weight.shape[0]
        assert x.dtype == torch.float32 and x.shape[-1] == width
        normalize_rows(
            x.data_ptr(),
            self.weight.data_ptr(),
            self.variance_epsilon,
            x.numel() // width,
            width,
            out.data_ptr(),
            thread_count(),
        )
        return out

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


def replace_norms(model: nn.Module) -> int:
    """Put the native form in the place of every RMSNorm of a loaded model that computes the same; returns how many.

    What a module computes is tried out, for families spell the norm in several ways (1 + weight, a gate beside it): any
    that differs stays as it is. Models in other types than float32 stay, where products round in between.
    """
    count = 0
    for name, module in list(model.named_modules()):
        native = _native_form(module)
        if native is not None:
            model.set_submodule(name, native)
            count += 1
    return count


def _native_form(module: nn.Module) -> NativeRMSNorm | None:
    weight: Any = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(epsilon, float) or list(module.children()):
        return None
    if not isinstance(weight, torch.Tensor) or weight.dtype != torch.float32 or weight.ndim != 1 or weight.shape[0] % 8:
        return None
    probe = torch.randn(PROBE_ROWS, weight.shape[0], generator=torch.Generator().manual_seed(0))
    probe *= torch.tensor([[1e-3], [1.0], [30.0], [1e-2]])  # epsilon shows in the small ones
    with torch.no_grad():
        for candidate in (weight, 1 + weight):
            native = NativeRMSNorm(candidate, epsilon)
            try:
                expected = module(probe)
            except TypeError:  # takes more than the values
                return None
            if torch.allclose(native(probe), expected, rtol=TOLERANCE, atol=TOLERANCE):
                return native.eval()
    return None
