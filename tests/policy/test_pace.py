from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.core import OptionError
from dynaexq.policy.pace import FEWEST, LEAST_SHARE, LINK_SHARE, STEPS, TICK_SECONDS, Pace, PaceOptions

LINK = 1e9
CALM = PaceOptions.calm_share
SLOWDOWNS = st.floats(0.0, 3.0)


def make(**options: float) -> Pace:
    return Pace(PaceOptions(**options), LINK)


def feed(pace: Pace, slowdown: float, tokens: int = 8, seconds: float = 0.01) -> None:
    """Enough steps of both kinds for an estimate."""
    for _ in range(FEWEST):
        pace.note_window(seconds, tokens, moving=False)
        pace.note_window(seconds * (1 + slowdown), tokens, moving=True)


def slow_down(pace: Pace, ticks: int, slowdown: float = 0.5, pending: float = 0.0) -> list[float]:
    """Rates of ticks before each of which steps show this slowdown."""
    rates = []
    for tick in range(ticks):
        feed(pace, slowdown)
        rates.append(pace.rate(tick * TICK_SECONDS, pending))
    return rates


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("step"), st.floats(1e-4, 10), st.integers(1, 5000), st.booleans()),
            st.tuples(st.just("feed"), SLOWDOWNS),
            st.tuples(st.just("shift")),
            st.tuples(st.just("rate"), st.floats(0, 100), st.floats(0, 1e13)),
        ),
        max_size=60,
    ),
    st.floats(LEAST_SHARE, LINK_SHARE),
    st.floats(1, 1e12),
)
def test_the_rate_stays_in_bounds_and_is_deterministic(events: list[tuple], calm: float, link: float) -> None:
    def play() -> list[float]:
        pace, now, rates = Pace(PaceOptions(calm_share=calm), link), 0.0, []
        for name, *values in events:
            if name == "step":
                pace.note_window(*values)
            elif name == "feed":
                feed(pace, *values)
            elif name == "shift":
                pace.note_shift(now)
            else:
                now += values[0]
                rates.append(pace.rate(now, values[1]))
        return rates

    rates = play()
    assert all(LEAST_SHARE * link <= rate <= LINK_SHARE * link for rate in rates)
    assert rates == play()


@given(SLOWDOWNS, SLOWDOWNS, st.floats(0, 1e12))
def test_more_slowdown_never_gives_a_higher_rate(one: float, other: float, pending: float) -> None:
    less, more = make(), make()
    low, high = sorted((one, other))
    for slow, fast in zip(slow_down(more, 8, high, pending), slow_down(less, 8, low, pending), strict=True):
        assert slow <= fast


def test_without_data_the_link_alone_limits() -> None:
    pace = make()
    assert pace.rate(0.0, 0.0) == CALM * LINK
    assert pace.rate(100.0, 0.5 * CALM * LINK) == CALM * LINK
    assert pace.share == CALM and pace.slowdown is None


def test_open_until_the_first_backlog_is_worked_off() -> None:
    pace, backlog = make(), 2 * CALM * LINK
    assert pace.rate(0.0, 0.0) == CALM * LINK
    assert pace.rate(1.0, backlog) == LINK_SHARE * LINK
    assert pace.rate(2.0, backlog) == LINK_SHARE * LINK
    assert pace.rate(3.0, 0.5 * CALM * LINK) == CALM * LINK
    assert pace.rate(4.0, backlog) == CALM * LINK


def test_open_at_once_for_a_while_after_a_shift() -> None:
    pace = make(shift_seconds=5)
    pace.rate(0.0, 0.0)
    pace.note_shift(10.0)
    assert pace.rate(10.0, 1.0) == LINK_SHARE * LINK
    assert pace.rate(14.9, 1.0) == LINK_SHARE * LINK
    assert pace.rate(15.0, 1.0) == CALM * LINK


def test_a_shift_does_not_open_what_slows_decode_steps_down() -> None:
    pace = make()
    slow_down(pace, 5)
    pace.note_shift(4 * TICK_SECONDS)
    assert pace.rate(4 * TICK_SECONDS, 0.0) < CALM * LINK


def test_slowdown_halves_down_to_the_floor_and_calm_steps_raise_slowly() -> None:
    pace = make()
    rates = slow_down(pace, 8)
    assert rates[:4] == pytest.approx([CALM * LINK / 2**cut for cut in range(4)])
    assert rates[-1] == LEAST_SHARE * LINK
    recovered = []
    for tick in range(8, 60):
        feed(pace, 0.0)
        recovered.append(pace.rate(tick * TICK_SECONDS, 0.0))
    assert recovered[0] == pytest.approx(1.1 * LEAST_SHARE * LINK)
    assert recovered == sorted(recovered)
    assert recovered[-1] == CALM * LINK


def test_recovers_without_steps_too() -> None:
    pace = make()
    slow_down(pace, 8)
    assert pace.rate(100.0, 0.0) == CALM * LINK


def test_a_cut_waits_for_steps_at_the_new_rate_and_for_its_tick() -> None:
    pace = make()
    pace.rate(0.0, 0.0)
    feed(pace, 0.5)
    assert pace.rate(0.9 * TICK_SECONDS, 0.0) == CALM * LINK
    assert pace.rate(TICK_SECONDS, 0.0) == CALM * LINK / 2
    assert pace.slowdown is None
    assert pace.rate(2 * TICK_SECONDS, 0.0) > CALM * LINK / 2


@given(st.floats(0.0, 2.0))
def test_the_slowdown_compares_like_token_counts(slowdown: float) -> None:
    pace = make()
    for _ in range(FEWEST):  # many tokens only with copies, few only without
        pace.note_window(0.01, 1, moving=False)
        pace.note_window(0.5, 64, moving=True)
    assert pace.slowdown is None
    feed(pace, slowdown, tokens=8)
    feed(pace, slowdown, tokens=300, seconds=0.2)
    assert pace.slowdown == pytest.approx(slowdown)


def test_single_slow_steps_do_not_count_and_old_steps_are_forgotten() -> None:
    pace = make()
    feed(pace, 0.0)
    pace.note_window(10.0, 8, moving=True)
    assert pace.slowdown == pytest.approx(0.0)
    for _ in range(STEPS):
        pace.note_window(0.05, 8, moving=True)
    assert pace.slowdown is None
    feed(pace, -0.2)
    assert pace.rate(0.0, 0.0) == CALM * LINK


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_impossible_inputs_are_refused(bad: float) -> None:
    pace = make()
    with pytest.raises(AssertionError):
        Pace(PaceOptions(), bad)
    with pytest.raises(AssertionError):
        pace.note_window(bad, 1, moving=True)
    with pytest.raises(AssertionError):
        pace.note_window(0.1, -1 if math.isnan(bad) else 0, moving=True)
    if bad:
        with pytest.raises(AssertionError):
            pace.rate(0.0, bad)
    if not math.isfinite(bad):
        with pytest.raises(AssertionError):
            pace.rate(bad, 0.0)
        with pytest.raises(AssertionError):
            pace.note_shift(bad)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("calm_share", 0.01),
        ("calm_share", 0.9),
        ("calm_share", math.nan),
        ("shift_seconds", -1.0),
        ("shift_seconds", math.inf),
        ("tpot_headroom", 0.0),
        ("tpot_headroom", math.nan),
    ],
)
def test_impossible_options_are_refused(name: str, value: float) -> None:
    with pytest.raises(OptionError):
        PaceOptions(**{name: value}).check()
