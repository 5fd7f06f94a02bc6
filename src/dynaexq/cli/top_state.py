"""What `GET /state` answers, as far as `dynaexq top` shows it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, model_validator


def clean(text: str) -> str:
    """Text that cannot move a terminal's cursor or hide other text."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


Plain = Annotated[str, AfterValidator(clean)]


class Tier(BaseModel):
    """A precision, and what is resident at it."""

    name: Plain
    bits: float
    experts: int
    bytes: int


class Memory(BaseModel):
    """The memory limit and who holds what of it."""

    limit: int
    used: int
    parts: dict[Plain, int]


class ExpertMemory(BaseModel):
    """What expert versions hold, and may hold."""

    bytes: int
    most: int


class Transitions(BaseModel):
    """Counters since start, and what is on its way."""

    promotions: int
    demotions: int
    evictions: int
    deferred: int
    failed: int
    bytes_moved: int
    waits: int
    wait_seconds: float
    in_flight: int
    reclaiming: int
    link_limit: float | None


class Requests(BaseModel):
    """Who waits, who runs, who has ended and why."""

    waiting: int
    running: int
    slots: int
    room: int
    finished: dict[Plain, int]


class RunningSequence(BaseModel):
    """One request in a slot."""

    number: int
    state: Plain
    prompt: int
    done: int
    generated: int
    most: int
    seconds: float


class Percentiles(BaseModel):
    """Of seconds, of so many things; None: the server does not say."""

    p50: float
    p99: float
    count: int | None = None


class Speed(BaseModel):
    """Of the last `seconds`."""

    seconds: float
    tokens_per_second: float
    prompt_tokens_per_second: float
    queue: Percentiles | None = None
    ttft: Percentiles | None
    tpot: Percentiles | None
    step: Percentiles | None


class Steps(BaseModel):
    """Of the engine since the start, and seconds of all."""

    count: int
    seconds: float


class Cache(BaseModel):
    """Experts that can be resident at once, needs of layers that were met by those or not, and reads.

    None: the server does not say; from `recall` on, it does not read ahead.
    """

    capacity: int
    hits: int
    misses: int
    hit_rate: float
    late: int | None = None
    useful: int | None = None
    wasted: int | None = None
    loads: int | None = None
    loads_ahead: int | None = None
    load_seconds: float | None = None
    hidden: float | None = None
    queued: int | None = None
    reading: int | None = None
    in_flight: int | None = None
    recall: float | None = None
    precision: float | None = None
    predicted: int | None = None
    horizon: int | None = None
    cancelled: int | None = None
    threshold: float | None = None
    standing_share: float | None = None


class ServerState(BaseModel):
    """A server at one moment; `map` has a digit for each expert, the index of its tier."""

    model: Plain
    version: Plain
    uptime_seconds: float
    status: Plain
    problems: list[Plain]
    mode: Plain
    paused: bool
    tiers: list[Tier]
    map: list[str]
    moving: list[tuple[int, int]]
    pinned: list[tuple[int, int, Plain]]
    memory: Memory
    expert_memory: ExpertMemory
    slots: list[int]
    transitions: Transitions
    cache: Cache | None = None
    hot_share_high: float
    hot_share_high_by_layer: list[float] | None
    requests: Requests
    sequences: list[RunningSequence]
    steps: Steps | None = None
    speed: Speed

    @model_validator(mode="after")
    def check(self) -> ServerState:
        """The map has layers of one size, at tiers that are listed."""
        if len({len(row) for row in self.map}) != 1 or not self.map[0]:
            raise ValueError("the map has no experts, or layers of several sizes")
        if not set("".join(self.map)) <= set("0123456789"[: len(self.tiers)]):
            raise ValueError("the map has tiers that are not listed")
        if len(self.hot_share_high_by_layer or self.map) != len(self.map):
            raise ValueError("traffic is not given for every layer of the map")
        return self
