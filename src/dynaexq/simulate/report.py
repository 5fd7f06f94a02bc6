"""What a simulated run says: quality of service, traffic, and where experts were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import tee
from typing import Any

from dynaexq.core import OptionError
from dynaexq.policy.prediction import Routers
from dynaexq.predictor.choice import AVERAGE
from dynaexq.residency import VersionSource
from dynaexq.residency.transitions import Counters
from dynaexq.simulate.costs import StepCosts
from dynaexq.simulate.feed import read_blocks
from dynaexq.simulate.journal import Journal, Recovery, Spread
from dynaexq.simulate.options import SimulationOptions
from dynaexq.simulate.world import build
from dynaexq.traffic.trace import TraceReader


@dataclass(frozen=True)
class SimulationReport:
    """Of one run.

    Args:
        seconds: virtual time in all; `tokens_per_second` are all tokens over that, `decode_tokens_per_second` those of
            decoding passes over the time of such passes.
        predicted_kl: nats per token, where it is known what versions lose.
        by_tier: share of router selections that ran at each tier, from the highest down; `raised`: above the lowest.
        read_bytes_per_token: of expert versions, on average.
        waits, wait_seconds: passes that waited for copies, and how long.
        churn: transitions per thousand tokens.
        cache: of a cache: how many experts it holds, needs of layers that it met or not, and for `expertflow` what
            became of reads and predictions, by the engine's names.
    """

    passes: int
    tokens: int
    seconds: float
    tokens_per_second: float
    decode_tokens_per_second: float | None
    ttft: Spread | None
    tpot: Spread | None
    tiers: list[str]
    by_tier: list[float]
    raised: float
    predicted_kl: float | None
    read_bytes_per_token: float
    expert_bytes: int
    waits: int
    wait_seconds: float
    bytes_moved: int
    promotions: int
    demotions: int
    deferred: int
    churn: float
    link_busy: float
    updates: int
    cache: dict[str, float] | None = None
    recoveries: list[Recovery] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """With names instead of places."""
        named = {
            "ttft": self.ttft and self.ttft._asdict(),
            "tpot": self.tpot and self.tpot._asdict(),
            "recoveries": [each._asdict() for each in self.recoveries],
        }
        return {**asdict(self), **named}


def simulate(
    source: VersionSource,
    options: SimulationOptions,
    costs: StepCosts,
    reader: TraceReader,
    progress: Callable[[int], None] = lambda _: None,
    routers: Routers | None = None,
) -> SimulationReport:
    """Run a trace under `options`; `progress(tokens)` every now and then; `routers` are for predictors that ask them.

    Raises:
        OptionError, MemoryLimitError: such a run cannot be had.
        SideFileError: the trace is damaged.
    """
    check_trace(options, reader)
    ahead, passes = read_blocks(reader), None
    if options.accuracy is not None:  # whoever knows the next pass reads along: two readers at a time are too many
        ahead, passes = tee(ahead)
    simulation, moving = build(source, options, costs, lambda: ahead, routers)
    cache = simulation.cache
    simulation.run(passes or read_blocks(reader, options.weighs, options.watches), progress)
    journal, control = simulation.journal, moving.control if moving else None
    counters = control.pipeline.counters if control else cache.counters if cache else Counters()
    busy = moving.link.busy_seconds if moving else cache.busy_seconds if cache else 0.0
    seconds, tokens = simulation.seconds, sum(journal.tokens.values())
    by_tier = simulation.by_tier()
    by_tier /= max(float(by_tier.sum()), 1e-30)
    ttft, tpot = journal.latencies()
    moves = counters.promotions + counters.demotions
    return SimulationReport(
        passes=sum(journal.passes.values()),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / max(seconds, 1e-30),
        decode_tokens_per_second=_rate(journal),
        ttft=ttft,
        tpot=tpot,
        tiers=simulation.tiers,
        by_tier=by_tier.tolist(),
        raised=float(by_tier[:-1].sum()),
        predicted_kl=journal.loss / max(tokens, 1) if source.sensitivity else None,
        read_bytes_per_token=journal.read_bytes / max(tokens, 1),
        expert_bytes=simulation.expert_bytes,
        waits=counters.waits,
        wait_seconds=counters.wait_seconds,
        bytes_moved=counters.bytes_moved,
        promotions=counters.promotions,
        demotions=counters.demotions,
        deferred=counters.deferred,
        churn=1000 * moves / max(tokens, 1),
        link_busy=busy / max(seconds, 1e-30),
        updates=control.ticks if control else 0,
        cache=cache.describe() if cache else None,
        recoveries=journal.recoveries(),
    )


def check_trace(options: SimulationOptions, reader: TraceReader) -> None:
    """Raise OptionError where the trace lacks what a run under `options` looks at."""
    if options.weighs and not reader.has_weights:
        raise OptionError("signal=mass needs routing weights, which the trace does not have; leave it out")
    if options.watches and not reader.has_hidden:
        raise OptionError(
            f"--predictor {options.predictor} looks at hidden states, which the trace does not have; record one with "
            f"--record-hidden, or take --predictor {AVERAGE}"
        )


def _rate(journal: Journal) -> float | None:
    return journal.tokens[False] / journal.busy[False] if journal.busy[False] else None
