"""What to run and how: the options of every command that loads a model, checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dynaexq.core import OptionError
from dynaexq.formats import TIERS, tier_format, tier_rank
from dynaexq.formats.base import require_standing
from dynaexq.kernels.base import check_kernel
from dynaexq.kernels.dense import check_dense
from dynaexq.policy.caching import CACHE_MODES, FLOW
from dynaexq.policy.mixing import AUTO, LOW, MISS_POLICIES, WAIT
from dynaexq.policy.prediction import check_router_temperature
from dynaexq.policy.regrouping import DEFAULT, RegroupingOptions, check_granularity
from dynaexq.predictor.choice import check_predictor
from dynaexq.traffic import check_state_file
from dynaexq.traffic.trace_writer import check_trace_target
from dynaexq.traffic.version_map import check_map_file
from dynaexq.tuning import MIXING_KNOBS, Tuning, make_tuning

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CACHED = CACHE_MODES
"""Modes that hold some experts and read the others when they are needed, or before."""

MODES = ("auto", "full", "static", "uniform", "static-map", "dynaexq", "blocking", "no-hysteresis", *CACHED)
ADAPTIVE = ("dynaexq", "blocking", "no-hysteresis")
DEFAULT_DENSE = "int8"
PAIRED = (*ADAPTIVE, "static-map")
"""Modes with a high and a low tier."""


@dataclass(frozen=True)
class LaunchOptions:
    """How to run a model. `memory` caps the whole process, `expert_memory` the expert pools, in bytes.

    `tune` holds values by knob (see tuning.py); `drive` says what moves versions: `thread`, or `replay` to repeat runs.
    `trace` is a file for what routers choose, with `trace_hidden` also for what they are given; `predictor` foresees
    routing in mode `expertflow`: a name or a file. With `miss_policy` `low` or `auto`, some needs that are missed there
    go to versions at `low`. `granularity` says which sequences run together where some experts are resident (see
    policy/regrouping.py).
    """

    mode: str = "auto"
    tier: str | None = None
    memory: int | None = None
    expert_memory: int | None = None
    dtype: str = "float32"
    kernel: str = "native"
    activations: str | None = None
    dense: str | None = None
    high: str | None = None
    low: str | None = None
    profile: Path | None = None
    state: Path | None = None
    ranking: Path | None = None
    tune: dict[str, Any] = field(default_factory=dict)
    drive: str = "thread"
    record: Path | None = None
    replay: Path | None = None
    trace: Path | None = None
    predictor: str | None = None
    trace_hidden: bool = False
    granularity: str | None = None
    miss_policy: str = WAIT
    router_temperature: float = 1.0

    @property
    def files(self) -> tuple[Path | None, ...]:
        """Files that options name."""
        return self.profile, self.state, self.ranking, self.record, self.replay, self.trace

    @property
    def moves(self) -> str:
        """What moves versions in the end: the drive of the control loop."""
        if self.mode in ("blocking", "static-map", *CACHED):
            return self.mode
        return "recorded" if self.replay else self.drive

    @property
    def rounding(self) -> str:
        """How activations meet quantised weights."""
        return self.activations or ("int8" if self.kernel == "native" else "fp32")

    @property
    def dense_form(self) -> str:
        """What dense weights are kept in."""
        return self.dense or (DEFAULT_DENSE if self.kernel == "native" else "full")

    def check(self) -> None:
        """Raise OptionError for unknown, conflicting or useless values."""
        if self.mode not in MODES:
            raise OptionError(f"unknown mode '{self.mode}'; known modes are {', '.join(MODES)}")
        if self.dtype not in DTYPES:
            raise OptionError(f"unknown dtype '{self.dtype}'; known are {', '.join(DTYPES)}")
        check_kernel(self.kernel, self.rounding)
        check_dense(self.dense_form)
        if self.kernel == "reference" and (self.rounding, self.dense_form) != ("fp32", "full"):
            raise OptionError(
                "--kernel reference rounds nothing (--activations fp32) and packs nothing (--dense full); other values "
                "go with the native kernel"
            )
        self._check_tiers()
        self._check_adaptive()
        self._check_misses()
        check_router_temperature(self.router_temperature)
        if self.predictor is not None:
            if self.mode != FLOW:
                raise OptionError(f"--predictor goes with --mode {FLOW}, not '{self.mode}'")
            check_predictor(self.predictor)
        if self.granularity is not None:
            if self.mode not in CACHED:
                raise OptionError(f"--granularity goes with --mode {' or '.join(CACHED)}, not '{self.mode}'")
            check_granularity(self.granularity)
        if self.trace is not None:
            check_trace_target(self.trace, "--record")
        elif self.trace_hidden:
            raise OptionError("--record-hidden goes with --record FILE")
        if self.memory is not None and self.expert_memory is not None and self.expert_memory >= self.memory:
            raise OptionError("--expert-memory is not below --memory, so it would limit nothing; leave it out")

    def make_tuning(self) -> Tuning:
        """The knobs in force. Raises OptionError for impossible or useless ones."""
        granularity = (self.granularity or DEFAULT) if self.mode in CACHED else None
        return make_tuning(self.tune, self.moves, self.mode != "no-hysteresis", granularity)

    @property
    def regrouping(self) -> RegroupingOptions:
        """Which sequences run together where some experts are resident."""
        return self.make_tuning().regrouping(self.granularity or DEFAULT)

    def _check_tiers(self) -> None:
        if self.tier is not None:
            tier_format(self.tier)
            require_standing(self.tier)
            if self.mode not in ("static", *CACHED):
                raise OptionError(
                    f"--tier {self.tier} goes with --mode static, {' or '.join(CACHED)}; mode '{self.mode}' takes none"
                )
        elif self.mode in ("static", *CACHED):
            raise OptionError(f"--mode {self.mode} needs --tier, one of {', '.join(TIERS)}")
        if (self.high is None) != (self.low is None) and self.mode != FLOW:
            raise OptionError("give --high and --low together")
        if self.high is not None and self.low is not None:
            if self.mode not in PAIRED:
                raise OptionError(f"--high and --low go with --mode {' or '.join(PAIRED)}, not '{self.mode}'")
            tier_format(self.high)
            tier_format(self.low)
            if self.mode == "static-map":
                require_standing(self.high)
            if tier_rank(self.high) <= tier_rank(self.low):
                raise OptionError(f"the high tier {self.high} is not above the low tier {self.low}")

    def _check_misses(self) -> None:
        if self.miss_policy not in MISS_POLICIES:
            raise OptionError(f"unknown miss policy '{self.miss_policy}'; known are {', '.join(MISS_POLICIES)}")
        mixed = self.miss_policy != WAIT
        if mixed and self.mode != FLOW:
            raise OptionError(f"--miss-policy {self.miss_policy} goes with --mode {FLOW}, not '{self.mode}'")
        if self.mode != FLOW:
            return
        if mixed is not (self.low is not None) or self.high is not None:
            raise OptionError(
                f"with --mode {FLOW}, --tier is the high tier, and --low TIER goes with --miss-policy {LOW} or {AUTO}"
            )
        for name in MIXING_KNOBS:
            if name in self.tune and not mixed:
                raise OptionError(f"{name} does nothing with --miss-policy {WAIT}; leave it out")
        if "patience" in self.tune and self.miss_policy == LOW:
            raise OptionError(f"patience does nothing with --miss-policy {LOW}; leave it out")
        if self.low is not None and self.tier is not None:
            tier_format(self.low)
            require_standing(self.low)
            if tier_rank(self.tier) <= tier_rank(self.low):
                raise OptionError(f"--tier {self.tier} is not above --low {self.low}")

    def _check_adaptive(self) -> None:
        if (self.profile is None) != (self.mode != "static-map"):
            raise OptionError("--mode static-map and --map FILE (made by `dynaexq calibrate`) go together")
        if self.mode not in ADAPTIVE:
            for name, value in (
                ("state", self.state),
                ("ranking", self.ranking),
                ("record-map", self.record),
                ("replay-map", self.replay),
            ):
                if value:
                    raise OptionError(f"--{name} goes with --mode {' or '.join(ADAPTIVE)}, not '{self.mode}'")
        if self.tune and self.mode not in (*PAIRED, *CACHED):
            raise OptionError(f"--tune goes with --mode {' or '.join((*PAIRED, *CACHED))}, not '{self.mode}'")
        for name, path in (("map", self.profile), ("ranking", self.ranking)):
            if path is not None and not path.is_file():
                raise OptionError(f"--{name} {path}: not there, or no regular file; `dynaexq calibrate` makes one")
        if self.state is not None:
            check_state_file(self.state)
        self._check_maps()
        self.make_tuning()

    def _check_maps(self) -> None:
        if self.record is not None:
            check_map_file(self.record)
        if self.replay is None:
            return
        if not self.replay.is_file():
            raise OptionError(f"--replay-map {self.replay}: not there, or no regular file; --record-map makes one")
        if self.mode != "dynaexq":
            raise OptionError(f"--replay-map goes with --mode dynaexq, not '{self.mode}'")
        for name, value in (("state", self.state), ("ranking", self.ranking), ("record-map", self.record)):
            if value is not None:
                raise OptionError(f"--{name} does nothing with --replay-map, which says what is high; leave one out")
