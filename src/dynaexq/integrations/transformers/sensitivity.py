"""How much noise in what a MoE layer's experts put out matters: measured, layer by layer, on a loaded model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from dynaexq.core import CheckpointError
from dynaexq.integrations.transformers.experts import LayerBinding
from dynaexq.integrations.transformers.quantizer import runtime_of

NOISE = 0.2
"""RMS of the noise, relative to that of a layer's outputs: as much as low tiers lose. Much less would drown in what the
rounding of activations makes of any change, and much more no longer cause a divergence that grows with its energy."""

MASSIVE = 100
"""A token whose outputs have more energy than this many common ones (the first of a text, with super experts) counts as
so many: noise of its size would leave nothing of all the others."""

POSITIONS = 32
"""Positions of a window whose distributions are compared, at most: those of a large vocabulary take much memory."""


def measure_sensitivity(
    model: Any, windows: Sequence[Sequence[int]], progress: Callable[[int, int], None]
) -> list[float]:
    """KL(clean || noisy) in nats per token, by the energy of noise in the experts' outputs per token, for every layer.

    Isotropic Gaussian noise of one size is added to what the experts of one layer at a time put out. It is drawn anew
    for every window, the same in every layer, and the same in every run. Nothing of it is traffic.

    Args:
        windows: token ids, a forward pass each; none is empty.
        progress: called with (passes done, all).

    Returns:
        [layers]; 0 for a layer whose experts put out nothing.

    Raises:
        CheckpointError: outputs are not finite.
    """
    modules, width = _bound_modules(model), runtime_of(model).experts.shape.expert.hidden
    total, done = len(windows) * (len(modules) + 2), 0

    def run(ids: Sequence[int], positions: torch.Tensor) -> torch.Tensor:
        nonlocal done
        result: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=positions).logits[0]
        done += 1
        progress(done, total)
        return result.to(torch.float32)

    with _apart(model):
        energies = _measure_outputs(modules, windows, run)
        sizes = [NOISE * math.sqrt(energy / width) for energy in energies]
        divergences, compared = [0.0] * len(modules), 0
        for number, ids in enumerate(windows):
            positions = torch.linspace(0, len(ids) - 1, min(POSITIONS, len(ids))).round().to(torch.int64)
            compared += len(positions)
            clean = torch.log_softmax(run(ids, positions), -1)
            for layer, (module, size) in enumerate(zip(modules, sizes, strict=True)):
                with _noise(module, size, number):
                    divergences[layer] += _divergence(clean, run(ids, positions))
    if not all(map(math.isfinite, (*energies, *divergences))):
        raise CheckpointError("the model's outputs are not finite: it does not compute; see its weights")
    return [
        max(0.0, divergence / compared) / (size**2 * width) if size else 0.0
        for divergence, size in zip(divergences, sizes, strict=True)
    ]


def _bound_modules(model: Any) -> list[Any]:
    """The experts modules of a loaded model, by MoE layer."""
    bindings = {each: getattr(each, "dynaexq", None) for each in model.modules()}
    layers = {binding.layer: each for each, binding in bindings.items() if isinstance(binding, LayerBinding)}
    return [layers[layer] for layer in range(len(layers))]


@contextlib.contextmanager
def _apart(model: Any) -> Iterator[None]:
    """Forward passes within are no traffic, and nobody taps them."""
    runtime = runtime_of(model)
    tap, runtime.tap = runtime.tap, None
    try:
        with runtime.trial(), torch.inference_mode():
            yield
    finally:
        runtime.tap = tap


def _measure_outputs(
    modules: list[Any], windows: Sequence[Sequence[int]], run: Callable[[Sequence[int], torch.Tensor], torch.Tensor]
) -> list[float]:
    """Mean over tokens of the energy of their outputs |y|^2, massive ones aside, for every layer."""
    energies: list[list[torch.Tensor]] = [[] for _ in modules]
    with contextlib.ExitStack() as stack:
        for module, found in zip(modules, energies, strict=True):

            def add(_: Any, __: Any, output: torch.Tensor, found: list[torch.Tensor] = found) -> None:
                found.append(output.to(torch.float32).square().sum(-1).flatten())

            stack.callback(module.register_forward_hook(add).remove)
        for ids in windows:
            run(ids, torch.tensor([len(ids) - 1]))
    tokens = [torch.cat(found) for found in energies]
    return [float(each.clamp(max=MASSIVE * each.median()).mean(dtype=torch.float64)) for each in tokens]


@contextlib.contextmanager
def _noise(module: Any, size: float, seed: int) -> Iterator[None]:
    """Add noise of RMS `size` to what `module` puts out."""
    generator = torch.Generator().manual_seed(seed)

    def add(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=generator)
        return (output.to(torch.float32) + size * noise).to(output.dtype)

    handle = module.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _divergence(clean: torch.Tensor, noisy: torch.Tensor) -> float:
    """KL(clean || noisy) summed over positions, log-probabilities and logits [positions, vocabulary]."""
    return sum(
        float(
            F.kl_div(torch.log_softmax(found, -1), expected, reduction="none", log_target=True).sum(dtype=torch.float64)
        )
        for expected, found in zip(clean, noisy, strict=True)  # one by one: copies stay small
    )
