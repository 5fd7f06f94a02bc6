"""What a simulation assumes of the machine: seconds of passes, and the link; from traces, a probe or people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from dynaexq.core import OptionError, SideFileError
from dynaexq.simulate.costs import Line, StepCosts, Timed, fit_costs
from dynaexq.simulate.feed import read_blocks
from dynaexq.traffic.trace import TraceReader
from dynaexq.tuning import GIGABYTE

MAX_PROBE_BYTES = 1 << 20


class Probed(NamedTuple):
    """Bytes per second, as `dynaexq probe` measured them."""

    read: float
    link: float


def read_probe(path: Path) -> Probed:
    """What `dynaexq probe --json FILE` wrote. Raises SideFileError."""
    try:
        if path.stat().st_size > MAX_PROBE_BYTES:
            raise ValueError("too large")
        found = json.loads(path.read_text(encoding="utf-8"))
        probed = Probed(float(found["memory"]["read"]), float(found["link"]["bytes_per_second"]))
        if not all(0 < speed < float("inf") for speed in probed):
            raise ValueError("speeds that are not above 0")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SideFileError(f"{path} is no result of `dynaexq probe --json`: {error}") from error
    return probed


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
        if path.stat().st_size > MAX_PROBE_BYTES:
            raise ValueError("too large")
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        return StepCosts.model_validate(found.get("costs", found))
    except (OSError, ValueError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise OptionError(
            f"--compute {path}: neither start=MS,token=MS,read=GB/s nor a file of `simulate --json`: {reason}"
        ) from error
