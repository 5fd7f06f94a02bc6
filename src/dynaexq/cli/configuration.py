"""Options from a file, as `dynaexq simulate --configs` writes them: what is typed wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dynaexq.core import OptionError

MAX_BYTES = 1 << 20


def load_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a file the defaults of the command's other options. Raises typer.BadParameter."""
    if path is None:
        return None
    try:
        values = read_configuration(path)
        known = {parameter.name for parameter in context.command.params} - {"config"}
        if unknown := sorted(values.keys() - known):
            raise OptionError(f"{path}: `{context.info_name}` has no option {unknown[0].replace('_', '-')}")
    except OptionError as error:
        raise typer.BadParameter(str(error)) from None
    context.default_map = {**(context.default_map or {}), **values}
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", is_eager=True, callback=load_defaults, help="Options from a JSON file; those typed here win.",
        show_default=False,
    ),
]  # fmt: skip


def read_configuration(path: Path) -> dict[str, Any]:
    """Values by option, with underscores. Raises OptionError where the file does not hold any."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise OptionError(f"{path} is larger than {MAX_BYTES >> 20} MiB: no options")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path} holds no options: {getattr(error, 'strerror', None) or error}") from error
    plain = (str, int, float, bool)
    if not isinstance(found, dict) or not all(
        isinstance(value, plain) or (isinstance(value, list) and all(isinstance(each, str) for each in value))
        for value in found.values()
    ):
        raise OptionError(f"{path} holds no options: write an object of texts, numbers and lists of texts by option")
    return {name.replace("-", "_"): value for name, value in found.items()}
