"""Opening checkpoints and stores as models, without remote code."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dynaexq.core import CheckpointError, DynaExqError, UnsupportedModelError
from dynaexq.integrations.transformers.config import DynaExqConfig
from dynaexq.integrations.transformers.families import ExpertLayers, find_expert_layers
from dynaexq.integrations.transformers.profile import profile_model
from dynaexq.integrations.transformers.quantizer import loading_progress
from dynaexq.integrations.transformers.source import CheckpointExperts
from dynaexq.plan.memory import ModelProfile
from dynaexq.store import Checkpoint


class Skeleton(NamedTuple):
    """A model without weights, its experts modules, and its sizes."""

    model: Any
    layers: ExpertLayers
    profile: ModelProfile


def open_skeleton(root: Path, tensors: int) -> Skeleton:
    """Build the model of `root`'s configuration on the meta device; `tensors` are there to fill it.

    Raises:
        CheckpointError: the configuration is missing or invalid.
        UnsupportedModelError: an unknown family, or one whose experts cannot be served.
    """
    if not (root / "config.json").is_file():
        raise CheckpointError(f"{root / 'config.json'} is missing")
    try:
        config = AutoConfig.from_pretrained(root)
        layers = int(config.get_text_config().num_hidden_layers)
        if not 0 < layers <= tensors:
            raise CheckpointError(f"{root / 'config.json'} says {layers} layers, but there are {tensors} tensors")
        return build_skeleton(config)
    except DynaExqError:
        raise
    except Exception as error:  # the family's own code on a configuration nobody has checked
        raise UnsupportedModelError(
            f"{root / 'config.json'} describes no causal language model that Transformers {transformers.__version__} "
            f"knows without remote code: {_first_line(error)}"
        ) from error


def build_skeleton(config: Any) -> Skeleton:
    """The model of a configuration, without weights. Raises UnsupportedModelError, and what the family's code does."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = find_expert_layers(model)
    return Skeleton(model, experts, profile_model(model, experts))


def open_experts(root: Path) -> tuple[Skeleton, CheckpointExperts]:
    """Skeleton and expert source of the checkpoint in `root`.

    Raises:
        CheckpointError: missing, cut short, inconsistent or unreadable.
        UnsupportedModelError: see open_skeleton.
    """
    checkpoint = Checkpoint.open(root)
    skeleton = open_skeleton(root, len(checkpoint.tensors))
    experts = CheckpointExperts(skeleton.model, skeleton.layers, checkpoint)
    if experts.unused_names:
        warnings.warn(
            f"{len(experts.unused_names)} tensors of {root} belong to no part of the model that runs and are left out, "
            f"such as {experts.unused_names[0]}",
            stacklevel=2,
        )
    return skeleton, experts


def load_model(
    root: Path, config: DynaExqConfig, dtype: torch.dtype, progress: Callable[[int, int], None] | None = None
) -> Any:
    """Load a store (or a checkpoint, quantising on the way) for inference; `progress(experts loaded, all)`.

    Raises:
        StoreError, CheckpointError, MemoryLimitError, UnsupportedModelError: as the parts do.
    """
    token = loading_progress.set(progress or loading_progress.get())
    with warnings.catch_warnings():
        # a store's config.json names the method, ours says how to load it: no conflict to warn of
        warnings.filterwarnings("ignore", message="You passed `quantization_config`")
        try:
            return AutoModelForCausalLM.from_pretrained(root, quantization_config=config, dtype=dtype).eval()
        finally:
            loading_progress.reset(token)


def load_tokenizer(root: Path) -> Any:
    """The tokenizer of `root`. Raises CheckpointError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(root)
    except Exception as error:  # whatever a damaged tokenizer file sets off
        what = "damaged" if (root / "tokenizer.json").exists() else "missing"
        raise CheckpointError(
            f"{root} has no usable tokenizer (tokenizer.json is {what}): {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def quiet_transformers() -> None:
    """Keep Transformers' progress bars and advice out of our output; its errors stay."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
