"""Model names: a local directory, or an id on the Hugging Face hub."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    NotASafetensorsRepoError,
    RepositoryNotFoundError,
)

from dynaexq.core import CheckpointError

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""What is fetched: no pickles, no code."""


def resolve_model(model: str) -> Path:
    """Directory of `model`; a hub id is downloaded into the hub's cache, resuming what is there.

    Raises:
        CheckpointError: neither a directory nor a hub id, or the hub cannot provide it.
    """
    if not model.strip():
        raise CheckpointError("the model's name is empty; give a model directory or a hub id such as org/name")
    path = Path(model).expanduser()
    try:
        if path.exists():
            return path
    except OSError as error:
        raise CheckpointError(f"{model} is no usable name: {error.strerror}") from error
    if not is_hub_id(model):
        raise CheckpointError(f"{model} is not a directory, nor a hub id such as org/name")
    with _hub_errors(model):
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=PATTERNS))


def is_hub_id(model: str) -> bool:
    """Whether `model` is written as an id on the hub, and no directory of that name is here."""
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model)) and not Path(model).exists()


def fetch_headers(model: str) -> tuple[Path, dict[str, int]]:
    """Directory with the configuration of a hub id, and the elements of each of its tensors: no weights are fetched.

    Raises:
        CheckpointError: the hub cannot provide them.
    """
    with _hub_errors(model):
        config = Path(huggingface_hub.hf_hub_download(model, "config.json"))
        files = huggingface_hub.get_safetensors_metadata(model).files_metadata.values()
    return config.parent, {name: math.prod(each.shape) for file in files for name, each in file.tensors.items()}


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Turn what goes wrong with the hub into CheckpointError."""
    try:
        yield
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model} is neither a directory here nor a model on the hub (or it is private)"
        ) from error
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, NotASafetensorsRepoError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{model} cannot be fetched from the hub: {reason}; download it by other means and give its directory"
        ) from error
