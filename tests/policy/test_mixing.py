"""Who is worth waiting for, where experts have low versions too."""

from __future__ import annotations

import numpy as np
import pytest

from dynaexq.core import OptionError
from dynaexq.policy.mixing import AUTO, LOW, WAIT, Costs, MixingOptions, pick_low, weigh_choices

WEIGHTS = np.array([0.1, 1.0, 0.5, 0.3])
COSTS = Costs(high=2.0, low=1.0, layer=4.0)


def pick(policy: str, here: str = "0000", low_here: str = "0000", room: int = 4, patience: float = 1.0) -> str:
    flags = [np.array([sign == "1" for sign in each]) for each in (here, low_here)]
    found = pick_low(policy, WEIGHTS, flags[0], flags[1], room, COSTS, patience)
    return "".join("1" if each else "0" for each in found)


def test_the_most_important_are_waited_for_as_long_as_patience_lasts() -> None:
    assert pick(WAIT) == "0000" and pick(LOW) == "1111"
    assert pick(AUTO) == "1111"  # four low reads take all the time there is
    assert pick(AUTO, patience=1.25) == "1011"  # 2 + 3
    assert pick(AUTO, patience=2) == "0000"
    assert pick(AUTO, low_here="1111") == "1001"  # low versions that are there take no time
    assert pick(AUTO, low_here="1111", patience=0) == "1111"


def test_who_is_there_runs_as_it_should_and_no_more_go_low_than_fit() -> None:
    assert pick(LOW, here="0101") == "1010"
    assert pick(LOW, room=2) == "1001" and pick(AUTO, room=1, patience=0) == "1000"
    assert pick_low(AUTO, WEIGHTS, np.zeros(4, bool), np.ones(4, bool), 4, Costs(0.0, 0.0, 0.0), 0.0).sum() == 0


def test_first_choices_weigh_more() -> None:
    assert weigh_choices(np.array([[2, 0], [2, 1]]), 4).tolist() == [0.5, 0.5, 2.0, 0.0]


@pytest.mark.parametrize("options", [MixingOptions(low_share=0.0), MixingOptions(patience=-1.0)])
def test_knobs_out_of_range_are_refused(options: MixingOptions) -> None:
    with pytest.raises(OptionError, match="is not in"):
        options.check()
