"""Knobs: what is typed is what runs, and nothing that would do nothing is taken."""

from __future__ import annotations

import pytest

from dynaexq.core import OptionError
from dynaexq.policy.foresight import ForesightOptions
from dynaexq.policy.mixing import MixingOptions
from dynaexq.policy.regrouping import RegroupingOptions
from dynaexq.tuning import FLOW_KNOBS, KNOBS, REGROUPING_KNOBS, Tuning, make_tuning, parse_tuning


def test_every_knob_parses_to_its_kind() -> None:
    settings = [
        "signal=mass", "alpha=0.5", "prefill_weight=0.25", "margin=0.1", "rank_slack=2", "first_interval=0.1",
        "interval=2", "slots=model", "shadow=off", "layout=replace", "spare=3", "in_flight=2", "link_gbps=4",
        "calm_share=0.1", "shift_seconds=5", "tpot_headroom=0.1", "keep_at_shift=0.5",
    ]  # fmt: skip
    tuning = make_tuning(parse_tuning(settings), "thread")
    assert tuning == Tuning(
        signal="mass", alpha=0.5, prefill_weight=0.25, margin=0.1, rank_slack=2, first_interval=0.1, interval=2.0,
        slots="model", shadow="off", layout="replace", spare=3, in_flight=2, link_gbps=4.0, calm_share=0.1,
        shift_seconds=5.0, tpot_headroom=0.1, keep_at_shift=0.5,
    )  # fmt: skip
    assert Tuning(**tuning.changed()) == tuning
    assert Tuning().changed() == {}
    assert parse_tuning(["every_windows=7"]) == {"every_windows": 7}
    others = {"every_windows", "rate_gbps", *FLOW_KNOBS, *REGROUPING_KNOBS}
    assert set(KNOBS) == {name.partition("=")[0] for name in settings} | others
    groups = ["quantum=3", "timeout_ms=10", "ageing=5", "min_batch=4", "admit_window=2"]
    regrouping = make_tuning(parse_tuning(groups), "lfu", granularity="sequence").regrouping("sequence")
    assert regrouping == RegroupingOptions("sequence", 3, 10.0, 5.0, 4, 2)
    flow = ["lookahead=2", "threshold=0.4", "standing_share=0.1", "standing_tokens=9", "low_share=0.1", "patience=2"]
    found = make_tuning(parse_tuning(flow), "expertflow")
    assert found.foresight == ForesightOptions(2, 0.4, 0.1, 9) and found.mixing == MixingOptions(0.1, 2.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["alpha"], "write NAME=VALUE"),
        (["speed=1"], "with a name of signal, alpha"),
        (["alpha=0.5", "alpha=0.6"], "given twice"),
        (["alpha=high"], "not a number"),
        (["rank_slack=1.5"], "not a whole number"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: list[str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_tuning(settings)


@pytest.mark.parametrize(
    "setting",
    [
        "alpha=1", "alpha=nan", "margin=-1", "margin=nan", "prefill_weight=inf", "rank_slack=-1", "interval=0.01",
        "interval=nan", "first_interval=0", "signal=noise", "layout=both", "spare=0", "in_flight=0", "rate_gbps=0",
        "rate_gbps=nan", "link_gbps=-1", "link_gbps=nan", "slots=expert", "shadow=maybe", "calm_share=0.9",
        "shift_seconds=-1", "tpot_headroom=0", "keep_at_shift=2",
    ],
)  # fmt: skip
def test_impossible_values_are_refused(setting: str) -> None:
    with pytest.raises(OptionError):
        make_tuning(parse_tuning([setting]), "thread")


@pytest.mark.parametrize(
    ("setting", "drive", "hysteresis"),
    [
        ("every_windows=2", "thread", True),
        ("interval=2", "replay", True),
        ("rate_gbps=1", "replay", True),
        ("rate_gbps=1", "blocking", True),
        ("margin=0.1", "thread", False),
        ("rank_slack=1", "thread", False),
        ("calm_share=0.1", "replay", True),
        ("tpot_headroom=0.1", "blocking", True),
        ("alpha=0.5", "static-map", True),
    ],
)
def test_values_that_would_do_nothing_are_refused(setting: str, drive: str, hysteresis: bool) -> None:
    with pytest.raises(OptionError, match="does nothing"):
        make_tuning(parse_tuning([setting]), drive, hysteresis)
    with pytest.raises(OptionError, match="needs no spare"):
        make_tuning({"layout": "keep", "spare": 1}, "thread")
    with pytest.raises(OptionError, match="calm_share does nothing beside rate_gbps"):
        make_tuning({"calm_share": 0.1, "rate_gbps": 1.0}, "thread")
    with pytest.raises(OptionError, match="shadow does nothing with slots=layer"):
        make_tuning({"slots": "layer", "shadow": "off"}, "thread")
    with pytest.raises(OptionError, match="unknown knob"):
        make_tuning({"speed": 1}, "thread")


def test_background_copies_take_their_share_of_the_link() -> None:
    assert Tuning().rate("thread", 1e9).bytes_per_second == 0.8e9
    assert Tuning(link_gbps=0.5).rate("thread", 1e9).bytes_per_second == 0.4e9
    assert Tuning(rate_gbps=3).rate("thread", 1e9).bytes_per_second == 3e9
    pace = Tuning(calm_share=0.1).pace("thread", 1e9)
    assert pace is not None and pace.rate(0.0, 0) == pytest.approx(0.1e9)
    assert Tuning().pace("replay", 1e9) is None and Tuning(rate_gbps=3).pace("thread", 1e9) is None
    assert Tuning().rate("replay", 1e9).bytes_per_second is None
    assert make_tuning({}, "thread", hysteresis=False).margin == 0
