"""What to simulate, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynaexq.core import OptionError
from dynaexq.formats import tier_format, tier_rank
from dynaexq.formats.base import require_standing
from dynaexq.launch_options import ADAPTIVE
from dynaexq.policy.caching import FLOW
from dynaexq.predictor.choice import AVERAGE, check_predictor
from dynaexq.simulate.cache import CACHES
from dynaexq.simulate.oracle import check_accuracy
from dynaexq.tuning import Tuning, make_tuning

CACHED = (*CACHES, FLOW)
"""Modes that hold some experts."""

MODES = ("static", "static-map", *ADAPTIVE, *CACHED)
DRIVES = ("thread", "replay")


@dataclass(frozen=True)
class SimulationOptions:
    """What to simulate.

    Args:
        mode: `static` at `tier`, `static-map` by `profile`, a mode that moves versions, or a cache (experts at `tier`).
        high, low: the highest and the lowest tier of those.
        expert_memory: bytes of expert versions.
        tune: values by knob (see tuning.py).
        drive: `thread`, or `replay` to update between passes, as `evaluate` does.
        link: bytes per second of copies; `latency`: seconds that each takes beside.
        drag: seconds by which a second of copies beside it makes a pass longer: on a CPU, copies take one of its cores.
        gaps: start no pass before it started when it was recorded.
        record: version map to write.
        predictor: of `expertflow`: a name, or the file of a trained one; None: `average`.
        accuracy: instead of it one that knows the trace, with so much recall and precision.
    """

    mode: str = "dynaexq"
    tier: str | None = None
    high: str | None = None
    low: str | None = None
    expert_memory: int | None = None
    tune: dict[str, Any] = field(default_factory=dict)
    drive: str = "thread"
    link: float = 1e9
    latency: float = 0.0
    drag: float = 0.0
    gaps: bool = False
    profile: Path | None = None
    record: Path | None = None
    predictor: str | None = None
    accuracy: float | None = None

    def check(self) -> None:
        """Raise OptionError for unknown, missing or useless values."""
        if self.mode not in MODES:
            raise OptionError(f"unknown mode '{self.mode}' to simulate; known are {', '.join(MODES)}")
        if (self.tier is None) is (self.mode in ("static", *CACHED)):
            raise OptionError(f"--tier and --mode {' or '.join(('static', *CACHED))} go together")
        self._check_tiers()
        if (self.profile is None) is (self.mode == "static-map"):
            raise OptionError("--mode static-map and --map FILE (made by `dynaexq calibrate`) go together")
        self._check_useless()
        if self.record is not None and self.mode not in ADAPTIVE:
            raise OptionError(f"--record-map goes with --mode {' or '.join(ADAPTIVE)}, not '{self.mode}'")
        if not 0 <= self.drag <= 1:
            raise OptionError(f"a drag of {self.drag:g} is not in 0..1")
        if not self.link > 0 or not 0 <= self.latency < float("inf"):
            raise OptionError(f"a link of {self.link:g} bytes per second and {self.latency:g} s: no copy would end")
        if self.mode not in ("static", *CACHES):
            make_tuning(self.tune, self.moves, hysteresis=self.mode != "no-hysteresis")
        self._check_foresight()

    def _check_foresight(self) -> None:
        for name, value in (("--predictor", self.predictor), ("--accuracy", self.accuracy)):
            if value is not None and self.mode != FLOW:
                raise OptionError(f"{name} goes with --mode {FLOW}, not '{self.mode}'")
        if self.predictor is not None:
            check_predictor(self.predictor)
        if self.accuracy is None:
            return
        check_accuracy(self.accuracy)
        if self.predictor is not None:
            raise OptionError(f"--predictor {self.predictor} and --accuracy {self.accuracy:g} exclude each other")
        if "threshold" in self.tune:
            raise OptionError("threshold does nothing beside --accuracy, where chances are 0 or 1; leave it out")

    def _check_useless(self) -> None:
        moving = self.mode not in ("static", *CACHED)
        if self.mode != "static" and self.expert_memory is None:
            raise OptionError(f"--mode {self.mode} needs --expert-memory, the bytes that versions may take")
        if self.mode == "static" and self.expert_memory is not None:
            raise OptionError("--expert-memory does nothing with --mode static; leave it out")
        for name, value in (("--high", self.high), ("--low", self.low), ("--tune", self.tune or None)):
            if value is not None and not (moving or (name == "--tune" and self.mode == FLOW)):
                raise OptionError(f"{name} does nothing with --mode {self.mode}; leave it out")
        copies = self.moves in ("thread", "blocking")
        if (self.drag and not copies) or (self.latency and not (copies or self.mode in CACHED)):
            raise OptionError(
                "--latency and --drag do nothing where versions stay or move between passes; leave them out"
            )
        if self.drive != "thread" and self.mode in CACHED:
            raise OptionError(f"--drive does nothing with --mode {self.mode}; leave it out")

    def _check_tiers(self) -> None:
        for tier in (self.tier, self.high, self.low):
            if tier is not None:
                tier_format(tier)
                if tier != self.high:
                    require_standing(tier)
        if self.high and self.low and tier_rank(self.high) <= tier_rank(self.low):
            raise OptionError(f"the high tier {self.high} is not above the low tier {self.low}")

    @property
    def moves(self) -> str:
        """What moves versions: the drive of the control loop, or the mode of a run in which none move."""
        return self.drive if self.mode in ("dynaexq", "no-hysteresis") else self.mode

    @property
    def weighs(self) -> bool:
        """Whether it looks at routing weights."""
        return self.tune.get("signal") == "mass"

    @property
    def watches(self) -> bool:
        """Whether it looks at what routers were given."""
        return self.predictor not in (None, AVERAGE)

    def speed(self, tuning: Tuning) -> float:
        """Bytes per second of copies, under these knobs."""
        return min(self.link, tuning.link_bytes_per_second or float("inf"))
