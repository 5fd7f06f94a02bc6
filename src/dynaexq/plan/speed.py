"""How fast one sequence decodes, from what a token reads and what a machine was measured to read. Pure arithmetic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dynaexq.core import SideFileError
from dynaexq.formats import tier_rank
from dynaexq.kernels.dense import embedding_bytes
from dynaexq.plan.memory import ModelProfile, Workload, dense_bytes

MAX_PROBE_BYTES = 1 << 20


class Machine(NamedTuple):
    """Bytes per second of memory and of the link to a store, and what share of reading kernels reach, by tier."""

    read: float
    link: float
    reached: Mapping[str, float]

    def share(self, tier: str) -> float:
        """Of a tier that was measured, else of the next lower one; 1 where none was."""
        known = sorted(self.reached, key=tier_rank)
        below = [name for name in known if tier_rank(name) <= tier_rank(tier)] or known[:1]
        return self.reached[below[-1]] if below else 1.0


class SpeedBand(NamedTuple):
    """Tokens per second, and the bytes that a token reads.

    `high`: everything as fast as memory is read; `low`: as fast as kernels were measured to read. What attention takes
    over a long context comes on top.
    """

    low: float
    high: float
    bytes_per_token: int


def read_probe(path: Path) -> Machine:
    """What `dynaexq probe --json FILE` wrote. Raises SideFileError."""
    try:
        if path.stat().st_size > MAX_PROBE_BYTES:
            raise ValueError("too large")
        found = json.loads(path.read_text(encoding="utf-8"))
        tiers = found.get("kernels", {}).get("tiers", {})
        reached = {str(tier): float(each["share_of_read"]) for tier, each in tiers.items()}
        machine = Machine(float(found["memory"]["read"]), float(found["link"]["bytes_per_second"]), reached)
        if not all(0 < value < float("inf") for value in (machine.read, machine.link, *reached.values())):
            raise ValueError("speeds that are not above 0")
        for tier in reached:
            tier_rank(tier)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SideFileError(f"{path} is no result of `dynaexq probe --json`: {error}") from error
    return machine


def expect_speed(
    profile: ModelProfile, work: Workload, active: Mapping[str, float], sizes: Mapping[str, int], machine: Machine
) -> SpeedBand:
    """Of one sequence.

    Args:
        active: experts that a token reads at each tier, all layers together.
        sizes: bytes of a version of each tier.
    """
    dense = dense_bytes(profile, work) - _looked_up(profile, work)
    experts = {tier: count * sizes[tier] for tier, count in active.items()}
    nbytes = dense + sum(experts.values())
    slowest = dense / machine.share("int8") + sum(each / machine.share(tier) for tier, each in experts.items())
    return SpeedBand(machine.read / slowest, machine.read / nbytes, int(nbytes))


def _looked_up(profile: ModelProfile, work: Workload) -> int:
    """Bytes of the table of embeddings, of which a token reads a row; none where the head reads all of it."""
    if not profile.embeddings or profile.embeddings[0] not in profile.matrices:
        return 0
    rows, columns = profile.embeddings[0]
    return embedding_bytes(work.dense, rows, columns) if work.dense != "full" else rows * columns * work.element_bytes
