"""What checks look at: numbers with units, of a server since its start or of a trace."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict


class Unit(Enum):
    """What a figure counts."""

    COUNT = "1"
    SHARE = "0..1"
    RATIO = "times"
    SECONDS = "s"
    BYTES = "bytes"
    SPEED = "bytes/s"
    LAYERS = "layers"


Count = Annotated[float | None, Unit.COUNT]
Share = Annotated[float | None, Unit.SHARE]
Ratio = Annotated[float | None, Unit.RATIO]
Seconds = Annotated[float | None, Unit.SECONDS]
Bytes = Annotated[float | None, Unit.BYTES]
Speed = Annotated[float | None, Unit.SPEED]
Layers = Annotated[float | None, Unit.LAYERS]


class Subject(BaseModel):
    """Whose figures they are; `mode` and `tier` (the lowest) of a server."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["server", "trace"]
    model: str
    layers: int
    experts: int
    mode: str | None = None
    tier: str | None = None


class Figures(BaseModel):
    """Of `subject`. None: not known, or there is no such thing.

    Args:
        steps, step_seconds: engine steps, and what one takes in the mean.
        step_p50, step_p99, step_count: of the last minute, and how many those are of; queue_* likewise, for time before
            a slot, of requests that ended.
        tpot_p50, tpot_p99, tpot_count: between tokens, by requests that ended.
        slots, running, waiting: sequences at a time, and requests now.
        memory_limit, memory_used, expert_bytes, kv_bytes, dense_bytes, activation_bytes: the plan.
        failed: reads of experts, or transitions.
        wait_share: of the time of steps, spent in waiting for weights.
        capacity: experts that a cache holds.
        needs: of layers for distinct experts; needs_per_step, needs_per_layer: in the mean.
        hit_rate, late_share: of needs, met by residents, or on their way.
        predicted, recall, precision: of needs, see policy/foresight.py.
        loads, loads_ahead: reads that ended; wasted_share: of those ahead, given up unused.
        load_seconds: of one read, in the mean; layer_seconds: what a layer takes without waiting.
        hidden: share of the time of reads that nobody waited for.
        link_share: seconds of reads over seconds of steps; above 1 where they go side by side.
        link_speed: bytes over seconds of reads; step_bytes: read for one step.
        queued, reading: reads now.
        horizon, threshold, standing_share, in_flight: knobs in force.
        moves: transitions that changed a tier; deferred_share: times that one found no block, of those and moves.
        moving, reclaiming: versions on their way, and blocks that wait for windows, now.
        high_traffic, high_experts: share of routed traffic, and of experts, above the lowest tier.
        tokens, selections: of a trace; selections of an average expert in each half.
        entropy, repeats, chance: see traffic/trace_statistics.py; repeats of the next token.
        stability: share of hot sets that both halves of a trace have in common.
        spread: share of a layer's experts that a pass of `spread_tokens` decoded tokens needs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    subject: Subject
    steps: Count = None
    step_seconds: Seconds = None
    step_p50: Seconds = None
    step_p99: Seconds = None
    step_count: Count = None
    tpot_p50: Seconds = None
    tpot_p99: Seconds = None
    tpot_count: Count = None
    queue_p50: Seconds = None
    queue_p99: Seconds = None
    queue_count: Count = None
    slots: Count = None
    running: Count = None
    waiting: Count = None
    memory_limit: Bytes = None
    memory_used: Bytes = None
    expert_bytes: Bytes = None
    kv_bytes: Bytes = None
    dense_bytes: Bytes = None
    activation_bytes: Bytes = None
    failed: Count = None
    wait_share: Share = None
    capacity: Count = None
    needs: Count = None
    needs_per_step: Count = None
    needs_per_layer: Count = None
    hit_rate: Share = None
    late_share: Share = None
    predicted: Count = None
    recall: Share = None
    precision: Share = None
    loads: Count = None
    loads_ahead: Count = None
    wasted_share: Share = None
    load_seconds: Seconds = None
    layer_seconds: Seconds = None
    hidden: Share = None
    link_share: Ratio = None
    link_speed: Speed = None
    step_bytes: Bytes = None
    queued: Count = None
    reading: Count = None
    horizon: Layers = None
    threshold: Share = None
    standing_share: Share = None
    in_flight: Count = None
    moves: Count = None
    deferred_share: Share = None
    moving: Count = None
    reclaiming: Count = None
    high_traffic: Share = None
    high_experts: Share = None
    tokens: Count = None
    selections: Count = None
    entropy: Share = None
    repeats: Share = None
    chance: Share = None
    stability: Share = None
    spread: Share = None
    spread_tokens: Count = None

    def known(self) -> Iterator[tuple[str, float]]:
        """Names and values of those that are known."""
        return ((name, value) for name in UNITS if (value := getattr(self, name)) is not None)


UNITS: dict[str, Unit] = {
    name: unit for name, field in Figures.model_fields.items() for unit in field.metadata if isinstance(unit, Unit)
}
"""Of every figure."""


def ratio(part: float | None, whole: float | None) -> float | None:
    """A part of a whole; None where one is not known, or there is no whole."""
    return None if part is None or not whole else part / whole
