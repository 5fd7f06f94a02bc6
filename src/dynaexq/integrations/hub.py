"""Model names: a local directory, or an id on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

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
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model):
        raise CheckpointError(f"{model} is not a directory, nor a hub id such as org/name")
    try:
        return Path(huggingface_hub.snapshot_download(model, allow_patterns=PATTERNS))
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{model} is neither a directory here nor a model on the hub (or it is private)"
        ) from error
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{model} cannot be fetched from the hub: {reason}; download it by other means and give its directory"
        ) from error
