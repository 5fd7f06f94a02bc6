"""Every knob of online precision, by the names people type: `--tune alpha=0.8`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from dynaexq.control_options import ControlOptions
from dynaexq.core import OptionError
from dynaexq.plan.versions import VersionWish, check_slots
from dynaexq.policy import HotnessOptions, SelectionOptions
from dynaexq.policy.caching import CACHE_POLICIES, FLOW
from dynaexq.policy.foresight import ForesightOptions
from dynaexq.policy.mixing import MixingOptions
from dynaexq.policy.pace import LINK_SHARE, Pace, PaceOptions
from dynaexq.policy.regrouping import DEFAULT, RegroupingOptions
from dynaexq.residency.layout import check_layout
from dynaexq.residency.transitions import RateLimit

GIGABYTE = 1e9
SHADOW = ("on", "off")

MARGIN, PRICED_MARGIN = 0.05, 0.02
"""Of hysteresis, by hotness and by what experts lose."""


@dataclass(frozen=True)
class Tuning:
    """Knobs of mode `dynaexq` and its ablations, and of caches; None means the default that the comment names.

    Args:
        signal: `count` (router selections, the paper's signal) or `mass` (routed probability).
        alpha: weight of the past in the moving average of hotness.
        prefill_weight: what a routed token of a prefill counts, where one of a decode step counts 1.
        margin: by how much an outsider must beat a member to replace it, in units of an average expert's traffic; where
            it is known what experts lose, in what the bytes an exchange moves would save as memory. Default 0.05, and
            0.02 there.
        rank_slack: ranks by which it must, in addition.
        first_interval, interval: seconds between updates (`T_u`): the first, then doubling up to `interval`.
        every_windows: forward passes between updates, where updates go by passes (evaluation).
        slots: `layer` (each layer has as many high slots, of two tiers: the paper's way) or `model` (layers share the
            slots of all tiers from the low to the high one, by what experts lose at them); default `model` for a store
            that was calibrated, else `layer`.
        shadow: `on` (where experts move by what they lose, a few tokens also run on another version of an expert, which
            says whether calibration was right) or `off`; default on where the scratch block that it needs is at most
            0.5 % of the bytes.
        layout: `replace` (a high version takes the low one's place: more high slots in the same bytes) or `keep` (the
            low version stays: a demotion copies nothing); default `replace`, but `keep` for a nested high tier.
        spare: spare low blocks of the layout `replace`; default 16, at most 1 % of experts.
        in_flight: copies queued at once.
        rate_gbps: gigabytes per second of copies in the background; default by the pace below.
        calm_share, shift_seconds, tpot_headroom: of the link that loading measured, copies take the calm share; 80 %
            for so many seconds after the workload has shifted, and at the start; less while decode steps are slowed
            down by more than the headroom, a share of their time.
        keep_at_shift: part of hotness that is kept when the workload has shifted.
        link_gbps: slow every copy down to this many gigabytes per second, to see what a slower link does.
        lookahead, threshold, standing_share, standing_tokens: of mode `expertflow`, see policy/foresight.py.
        quantum, timeout_ms, ageing, min_batch, admit_window: of caches that sequences share, see policy/regrouping.py;
            the first with granularity `sequence`, the next three also with `token`, the last with any.
        low_share, patience: of `expertflow` with low versions too, see policy/mixing.py.
    """

    signal: str = "count"
    alpha: float = HotnessOptions.alpha
    prefill_weight: float = HotnessOptions.prefill_weight
    margin: float | None = None
    rank_slack: int = 0
    first_interval: float = ControlOptions.first_interval
    interval: float = ControlOptions.interval
    every_windows: int = ControlOptions.every_windows
    slots: str | None = None
    shadow: str | None = None
    layout: str | None = None
    spare: int | None = None
    in_flight: int = RateLimit.in_flight
    rate_gbps: float | None = None
    calm_share: float = PaceOptions.calm_share
    shift_seconds: float = PaceOptions.shift_seconds
    tpot_headroom: float = PaceOptions.tpot_headroom
    keep_at_shift: float = ControlOptions.keep_at_shift
    link_gbps: float | None = None
    lookahead: int | None = ForesightOptions.lookahead
    threshold: float = ForesightOptions.threshold
    standing_share: float = ForesightOptions.standing_share
    standing_tokens: int = ForesightOptions.standing_tokens
    quantum: int = RegroupingOptions.quantum
    timeout_ms: float = RegroupingOptions.timeout_ms
    ageing: float = RegroupingOptions.ageing
    min_batch: int = RegroupingOptions.min_batch
    admit_window: int = RegroupingOptions.admit_window
    low_share: float = MixingOptions.low_share
    patience: float = MixingOptions.patience

    def check(self) -> None:
        """Raise OptionError for unknown or impossible values."""
        if self.link_gbps is not None and not self.link_gbps > 0:
            raise OptionError(f"link_gbps {self.link_gbps} must be above 0")
        self.control("thread").check()
        self.rate("thread", 1.0).check()
        self.pace_options.check()
        check_slots(self.slots)
        if self.shadow not in (None, *SHADOW):
            raise OptionError(f"unknown shadow '{self.shadow}'; known are {', '.join(SHADOW)}")
        check_layout(self.layout, self.spare)
        self.foresight.check()
        self.regrouping().check()
        self.mixing.check()

    def control(self, drive: str, priced: bool = False) -> ControlOptions:
        """Options of the control loop; `priced`: it is known what experts lose."""
        margin = (PRICED_MARGIN if priced else MARGIN) if self.margin is None else self.margin
        return ControlOptions(
            drive=drive,
            first_interval=self.first_interval,
            interval=self.interval,
            every_windows=self.every_windows,
            signal=self.signal,
            hotness=self.hotness,
            keep_at_shift=self.keep_at_shift,
            selection=SelectionOptions(margin, self.rank_slack),
        )

    @property
    def hotness(self) -> HotnessOptions:
        """How traffic becomes hotness."""
        return HotnessOptions(self.alpha, self.prefill_weight)

    def rate(self, drive: str, link_bytes_per_second: float) -> RateLimit:
        """Bounds on copies over a link that was measured at `link_bytes_per_second`; a rate only in the background."""
        if drive != "thread":
            return RateLimit(None, self.in_flight)
        chosen = LINK_SHARE * self._link(link_bytes_per_second)
        return RateLimit(chosen if self.rate_gbps is None else self.rate_gbps * GIGABYTE, self.in_flight)

    def pace(self, drive: str, link_bytes_per_second: float) -> Pace | None:
        """What changes the rate as things go; None: it is chosen, or copies are not in the background."""
        if drive != "thread" or self.rate_gbps is not None:
            return None
        return Pace(self.pace_options, self._link(link_bytes_per_second))

    @property
    def foresight(self) -> ForesightOptions:
        """Of reading ahead."""
        return ForesightOptions(self.lookahead, self.threshold, self.standing_share, self.standing_tokens)

    @property
    def mixing(self) -> MixingOptions:
        """Of misses where experts have low versions too."""
        return MixingOptions(self.low_share, self.patience)

    def regrouping(self, granularity: str = DEFAULT) -> RegroupingOptions:
        """Of which sequences run together."""
        return RegroupingOptions(granularity, **{name: getattr(self, name) for name in REGROUPING_KNOBS})

    @property
    def pace_options(self) -> PaceOptions:
        """Of the pace."""
        return PaceOptions(self.calm_share, self.shift_seconds, self.tpot_headroom)

    def _link(self, measured: float) -> float:
        return min(measured, self.link_bytes_per_second or float("inf"))

    def wish(self, high: str, low: str) -> VersionWish:
        """How to spend bytes between two tiers."""
        shadow = None if self.shadow is None else self.shadow == "on"
        return VersionWish(high, low, self.slots, self.layout, self.spare, shadow)

    @property
    def link_bytes_per_second(self) -> float | None:
        """What copies are slowed down to; None: nothing."""
        return None if self.link_gbps is None else self.link_gbps * GIGABYTE

    def changed(self) -> dict[str, Any]:
        """The knobs that are not at their default: `Tuning(**changed())` is the same tuning."""
        pairs = ((name, getattr(self, name)) for name in KNOBS)
        return {name: value for name, value in pairs if value != getattr(Tuning(), name)}

    def without_hysteresis(self) -> Tuning:
        """Plain top-n: the ablation `no-hysteresis`."""
        return replace(self, margin=0.0, rank_slack=0)


KNOBS = tuple(field.name for field in fields(Tuning))
PACE_KNOBS = ("calm_share", "shift_seconds", "tpot_headroom")
MIXING_KNOBS = ("low_share", "patience")
FLOW_KNOBS = ("lookahead", "threshold", "standing_share", "standing_tokens", *MIXING_KNOBS)
GROUP_KNOBS = ("timeout_ms", "ageing", "min_batch")
REGROUPING_KNOBS = ("quantum", *GROUP_KNOBS, "admit_window")
USED_BY = {"batch": ("admit_window",), "sequence": REGROUPING_KNOBS, "token": (*GROUP_KNOBS, "admit_window")}
"""Knobs of caches that sequences share, by granularity."""

IDLE_KNOBS = {
    "thread": ("every_windows", *FLOW_KNOBS),
    "blocking": ("every_windows", "rate_gbps", *PACE_KNOBS, *FLOW_KNOBS),
    "recorded": tuple(name for name in KNOBS if name not in ("slots", "shadow", "layout", "spare")),
    "static-map": tuple(name for name in KNOBS if name != "slots"),
    **{name: tuple(knob for knob in KNOBS if knob not in ("link_gbps", *REGROUPING_KNOBS)) for name in CACHE_POLICIES},
    FLOW: tuple(knob for knob in KNOBS if knob not in (*FLOW_KNOBS, "in_flight", "link_gbps", *REGROUPING_KNOBS)),
    "replay": ("first_interval", "interval", "in_flight", "rate_gbps", "link_gbps", *PACE_KNOBS, *FLOW_KNOBS),
}
"""Knobs that would do nothing: a replay's updates go by passes, and only copies in the background are held back."""

MOVES = {
    "thread": "versions move in the background",
    "blocking": "passes wait for every move",
    "recorded": "versions move as they were recorded",
    "replay": "versions move between passes, and settle before the next",
    "static-map": "versions stay",
    **dict.fromkeys(CACHE_POLICIES, "experts are read when they are needed"),
    FLOW: "experts are read before they are needed",
}
HYSTERESIS_KNOBS = ("margin", "rank_slack")


def parse_tuning(settings: Sequence[str]) -> dict[str, Any]:
    """Values by knob from `NAME=VALUE` texts. Raises OptionError for what is unknown, repeated or no number."""
    kinds = get_type_hints(Tuning)
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in kinds:
            raise OptionError(f"--tune {setting}: write NAME=VALUE, with a name of {', '.join(KNOBS)}")
        if name in values:
            raise OptionError(f"--tune {name} is given twice")
        values[name] = _convert(name, text, kinds[name])
    return values


def make_tuning(values: dict[str, Any], drive: str, hysteresis: bool = True, granularity: str | None = None) -> Tuning:
    """Checked knobs for a drive and, where sequences share a cache, for a granularity.

    Raises:
        OptionError: an impossible value, or one that would do nothing under this drive or without hysteresis.
    """
    for name in values:
        if name not in KNOBS:
            raise OptionError(f"unknown knob {name!r}; known are {', '.join(KNOBS)}")
        if name in IDLE_KNOBS.get(drive, ()):
            raise OptionError(f"{name} does nothing here, where {MOVES[drive]}; leave it out")
        if name in REGROUPING_KNOBS and name not in USED_BY.get(granularity or "", ()):
            where = "here, where no sequences share a cache" if granularity is None else f"at granularity {granularity}"
            raise OptionError(f"{name} does nothing {where}; leave it out")
        if name in HYSTERESIS_KNOBS and not hysteresis:
            raise OptionError(f"{name} does nothing in mode 'no-hysteresis'")
        if name in PACE_KNOBS and "rate_gbps" in values:
            raise OptionError(f"{name} does nothing beside rate_gbps, which fixes the rate; leave one out")
    if values.get("slots") == "layer" and "shadow" in values:
        raise OptionError("shadow does nothing with slots=layer; leave it out")
    tuning = Tuning(**values)
    tuning = tuning if hysteresis else tuning.without_hysteresis()
    tuning.check()
    return tuning


def _convert(name: str, text: str, kind: Any) -> Any:
    for number in (int, float):
        if kind in (number, number | None):
            try:
                return number(text)
            except ValueError:
                raise OptionError(f"--tune {name}={text}: not {'a whole' if number is int else 'a'} number") from None
    return text
