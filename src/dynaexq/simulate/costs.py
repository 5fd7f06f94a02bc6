"""What a forward pass takes: a line in tokens and in bytes of experts read, fitted to passes that were timed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dynaexq.core import OptionError

Column = np.ndarray[Any, np.dtype[np.float64]]

FEWEST = 8
"""Timed passes of a kind that make a line."""

OUTLIER = 4.0
"""Passes further from the line than so many median deviations are left out: the machine did something else."""

VARIES = 0.02
"""Relative spread below which a column is as good as constant."""

ROUNDS = 3


class Line(BaseModel):
    """Seconds of a pass: `start`, `token` for each, `byte` for each byte of distinct experts read."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    start: float = Field(0.0, ge=0)
    token: float = Field(0.0, ge=0)
    byte: float = Field(0.0, ge=0)

    def seconds(self, tokens: Column | int, nbytes: Column | float) -> Any:
        """Of passes of so many tokens that read so many bytes."""
        return self.start + self.token * tokens + self.byte * nbytes


class StepCosts(BaseModel):
    """Lines for passes that decode and passes that are mostly prompts; `error` is the median relative error of each."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    decode: Line
    prefill: Line
    passes: dict[str, int] = {}
    error: dict[str, float] = {}

    def line(self, prefill: bool) -> Line:
        """For passes of a kind."""
        return self.prefill if prefill else self.decode


class Timed(NamedTuple):
    """Passes that were timed, each [passes]."""

    prefill: np.ndarray[Any, np.dtype[np.bool_]]
    tokens: Column
    nbytes: Column
    seconds: Column

    def where(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Timed:
        """Some of them."""
        return Timed(self.prefill[mask], self.tokens[mask], self.nbytes[mask], self.seconds[mask])


def fit_costs(parts: Sequence[Timed], read_bytes_per_second: float | None) -> StepCosts:
    """Costs from the passes of one or more runs.

    Where runs never changed what a token read, time by bytes cannot be told from time by tokens: decode passes are then
    taken to read at `read_bytes_per_second`, and prompts, which computing bounds, to get bytes for nothing.

    Raises:
        OptionError: too few timed passes, or nothing says what bytes cost.
    """
    lines, passes, errors = {}, {}, {}
    for name, prefill in (("decode", False), ("prefill", True)):
        chosen = _join([part.where((part.prefill == prefill) & (part.seconds > 0)) for part in parts])
        if len(chosen.seconds) < FEWEST:
            continue
        byte = None if _apart(chosen) else 0.0 if prefill else _price(read_bytes_per_second)
        lines[name], errors[name] = _fit(chosen, byte)
        passes[name] = len(chosen.seconds)
    if not lines:
        raise OptionError(
            f"fewer than {FEWEST} forward passes were timed, so what they take is not known; say it with --compute"
        )
    either = next(iter(lines.values()))
    return StepCosts(
        decode=lines.get("decode", either), prefill=lines.get("prefill", either), passes=passes, error=errors
    )


def _join(parts: Sequence[Timed]) -> Timed:
    return Timed(
        np.concatenate([part.prefill for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.nbytes for part in parts]),
        np.concatenate([part.seconds for part in parts]),
    )


def _price(read_bytes_per_second: float | None) -> float:
    if not read_bytes_per_second:
        raise OptionError(
            "all decode passes read as many bytes of experts for their tokens, so what a byte costs is not known; add "
            "a trace of a run at another tier with --fit, or say --probe FILE (of `dynaexq probe --json`)"
        )
    return 1 / read_bytes_per_second


def _apart(timed: Timed) -> bool:
    """Whether bytes say more than tokens do: what a line in tokens leaves of them still varies."""
    columns = np.stack([np.ones_like(timed.tokens), timed.tokens], 1)
    rest = timed.nbytes - columns @ np.linalg.lstsq(columns, timed.nbytes, rcond=None)[0]
    return float(rest.std() / max(timed.nbytes.mean(), 1e-30)) > VARIES


def _fit(timed: Timed, byte: float | None) -> tuple[Line, float]:
    """The line with the least relative error, none of whose parts is negative, and its median relative error."""
    kept = np.ones(len(timed.seconds), np.bool_)
    for _ in range(ROUNDS):
        line = _solve(timed.where(kept), byte)
        ratio = np.abs(line.seconds(timed.tokens, timed.nbytes) / timed.seconds - 1)
        kept = ratio <= max(OUTLIER * float(np.median(ratio)), 0.02)
    return line, float(np.median(ratio))


def _solve(timed: Timed, byte: float | None) -> Line:
    """Least squares of relative errors over all choices of parts, the best one without a negative part."""
    columns = np.stack([np.ones_like(timed.tokens), timed.tokens, timed.nbytes], 1) / timed.seconds[:, None]
    target = np.ones(len(columns)) - (0 if byte is None else byte * columns[:, 2])
    free = range(3 if byte is None else 2)
    best, least = np.zeros(3), np.inf
    for size in range(len(free) + 1):
        for parts in itertools.combinations(free, size):
            found = np.zeros(3)
            if parts:
                found[list(parts)] = np.linalg.lstsq(columns[:, parts], target, rcond=None)[0]
            loss = float(np.square(target - columns @ found).sum())
            if (found >= 0).all() and loss < least:
                best, least = found, loss
    return Line(start=best[0], token=best[1], byte=best[2] if byte is None else byte)
