"""Super experts: high whatever traffic says, as long as there is room and nobody says otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynaexq.core import ExpertKey, ExpertShape, ModelShape, OptionError
from dynaexq.policy import SelectionOptions
from dynaexq.residency.layout import PoolPlan
from dynaexq.steering import Steering

SHAPE = ModelShape(2, 4, ExpertShape(64, 32))
SUPER = ExpertKey(1, 3)


class Border:
    """Pools that any wish is granted for."""

    plan = PoolPlan((3, 2, 1), (1, 2), (1, 3, 6), keep_low=False)

    def __init__(self) -> None:
        self.most = self.wanted = self.plan.slots

    def want(self, slots: Any) -> None:
        self.wanted = slots


def steer() -> Steering:
    border: Any = Border()
    return Steering(SHAPE, border, SelectionOptions(), np.ones((2, 2, 4)), over_model=True, super_experts=(SUPER,))


def test_pins_that_have_no_place_are_refused() -> None:
    steering = steer()
    everybody = SHAPE.expert_keys()
    with pytest.raises(OptionError, match="6 experts would be pinned low, at the lowest tier, but 5 can be; pin fewer"):
        steering.pin(everybody[:6], high=False)
    with pytest.raises(OptionError, match="2 experts would be pinned high, at the highest tier, but 1 can be"):
        steering.pin(everybody[:2], high=True)
    steering.pin(everybody[:5], high=False)
    levels = steering.choose(np.zeros((2, 4)), np.full((2, 4), 2, np.int8))
    assert (levels.ravel()[:5] == 2).all() and sorted(levels.ravel()[5:]) == [0, 1, 1]  # whose places others take


def test_they_are_high_from_the_start_and_stay() -> None:
    steering, hotness = steer(), np.arange(8, 0, -1.0).reshape(2, 4)
    levels = steering.start(hotness)
    assert levels[SUPER] == 0 and (levels == 1).sum() == 2
    assert steering.choose(hotness, levels)[SUPER] == 0
    assert steering.pins == {}


def test_people_and_a_lack_of_room_come_first() -> None:
    steering, hotness = steer(), np.ones((2, 4))
    steering.pin([SUPER], high=False)
    assert steering.choose(hotness, np.full((2, 4), 2, np.int8))[SUPER] == 2
    steering.unpin([SUPER])
    steering.pin([ExpertKey(0, 0)], high=True)
    levels = steering.choose(hotness, np.full((2, 4), 2, np.int8))
    assert levels[0, 0] == 0 and levels[SUPER] > 0
    steering.unpin([ExpertKey(0, 0)])
    steering.switch("static")
    assert (steering.choose(hotness, levels) == 2).all()
