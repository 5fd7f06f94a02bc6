"""What a simulation assumes of passes: seconds, from traces or people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dynaexq.core import OptionError
from dynaexq.simulate.costs import Line, StepCosts, Timed, fit_costs
from dynaexq.simulate.feed import read_blocks
from dynaexq.traffic.trace import TraceReader
from dynaexq.tuning import GIGABYTE

MAX_COSTS_BYTES = 1 << 20


def parse_costs(text: str) -> StepCosts:
    """Costs as typed, `start=4,token=0.5,read=12` (ms, ms, GB/s), or in a file that `simulate --json` wrote.

    Raises:
        OptionError: neither.
    """
    path = Path(text)
    if "=" not in text:
        return _read_costs(path)
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            values[name.strip()] = float(number)
        except ValueError:
            raise OptionError(f"--compute {text}: {part!r} is no NAME=NUMBER") from None
    if not values.keys() <= {"start", "token", "read"} or min(values.values()) < 0 or values.get("read") == 0:
        raise OptionError(f"--compute {text}: write start=MS,token=MS,read=GB/s, none negative")
    byte = 1 / (values["read"] * GIGABYTE) if "read" in values else 0.0
    try:
        line = Line(start=values.get("start", 0) / 1000, token=values.get("token", 0) / 1000, byte=byte)
    except ValidationError as error:
        raise OptionError(f"--compute {text}: {error.errors()[0]['msg']}") from error
    if not (line.start or line.token or line.byte):
        raise OptionError(f"--compute {text}: passes that take no time")
    return StepCosts(decode=line, prefill=line)


def fit_to_traces(paths: Sequence[Path], read_bytes_per_second: float | None) -> StepCosts:
    """Costs from the passes that traces timed. Raises SideFileError, OptionError."""
    parts: list[Timed] = []
    for path in paths:
        reader = TraceReader.open(path)
        try:
            parts += [block.timed() for block in read_blocks(reader)]
        finally:
            reader.close()
    return fit_costs(parts, read_bytes_per_second)


def _read_costs(path: Path) -> StepCosts:
    try:
        if path.stat().st_size > MAX_COSTS_BYTES:
            raise ValueError("too large")
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        return StepCosts.model_validate(found.get("costs", found))
    except (OSError, ValueError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise OptionError(
            f"--compute {path}: neither start=MS,token=MS,read=GB/s nor a file of `simulate --json`: {reason}"
        ) from error
