"""Costs of passes: a known machine is found again, and what cannot be told is not made up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.core import OptionError
from dynaexq.simulate.conditions import parse_costs
from dynaexq.simulate.costs import Line, Timed, fit_costs

PARTS = st.floats(0.1, 10.0)


def make(line: Line, tokens: np.ndarray, nbytes: np.ndarray, prefill: bool = False) -> Timed:
    return Timed(np.full(len(tokens), prefill), tokens, nbytes, line.seconds(tokens, nbytes))


def spread(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(1, 33, 200).astype(float), random.uniform(1e6, 1e8, 200)


@given(start=PARTS, token=PARTS, read=PARTS)
def test_a_line_is_found_again(start: float, token: float, read: float) -> None:
    true = Line(start=start / 1e3, token=token / 1e4, byte=1 / (read * 1e9))
    found = fit_costs([make(true, *spread())], None)
    for name in ("start", "token", "byte"):
        assert getattr(found.decode, name) == pytest.approx(getattr(true, name), rel=1e-6)
    assert found.prefill == found.decode and found.error["decode"] < 1e-6 and found.passes == {"decode": 200}


def test_passes_that_were_disturbed_are_left_out() -> None:
    true, (tokens, nbytes) = Line(start=0.004, token=0.0005, byte=1e-10), spread()
    timed = make(true, tokens, nbytes)
    timed.seconds[::10] *= 8
    found = fit_costs([timed], None).decode
    assert found.start == pytest.approx(true.start, rel=1e-6) and found.byte == pytest.approx(true.byte, rel=1e-6)


def test_no_part_of_a_line_is_negative() -> None:
    tokens, nbytes = spread()
    falling = Timed(np.zeros(200, bool), tokens, nbytes, 0.01 - 5e-11 * nbytes + 1e-3 * tokens)
    line = fit_costs([falling], None).decode
    assert min(line.start, line.token, line.byte) == line.byte == 0


def test_bytes_that_never_change_have_a_price_only_if_somebody_says_it() -> None:
    true, tokens = Line(start=0.004, token=0.0, byte=1e-10), np.ones(50)
    same = make(true, tokens, np.full(50, 4e7))
    with pytest.raises(OptionError, match=r"add a trace of a run at another tier with --fit, or say --probe"):
        fit_costs([same], None)
    found = fit_costs([same], 1e10).decode
    assert found.byte == 1e-10 and found.start + found.token == pytest.approx(0.004)
    other = make(true, tokens, np.full(50, 2e7))
    assert fit_costs([same, other], None).decode.byte == pytest.approx(1e-10)


def test_too_few_timed_passes_are_refused() -> None:
    tokens, nbytes = spread()
    untimed = Timed(np.zeros(200, bool), tokens, nbytes, np.zeros(200))
    with pytest.raises(OptionError, match="say it with --compute"):
        fit_costs([untimed], 1e10)


def test_costs_as_people_type_them() -> None:
    costs = parse_costs("start=4,token=0.5,read=10")
    assert costs.decode == costs.prefill == Line(start=0.004, token=0.0005, byte=1e-10)
    for text in ("start=x", "start=-1", "speed=3", "read=0", "start=0", "start=nan", "nowhere.json"):
        with pytest.raises(OptionError, match="--compute"):
            parse_costs(text)
