"""What predictors say, and what is made of it: horizon, standing set, wishes."""

from __future__ import annotations

import numpy as np
import pytest

from dynaexq.core import ExpertShape, ModelShape, OptionError
from dynaexq.policy import trial
from dynaexq.policy.foresight import Foresight, ForesightOptions, make_flow_mind
from dynaexq.policy.horizon import PERIOD, Horizon, lead_steps
from dynaexq.policy.prediction import (
    MovingAverage,
    PreGate,
    Routers,
    chance_of_need,
    choice_chances,
    standardise,
    thin,
)
from dynaexq.policy.standing import StandingSet

LAYERS, EXPERTS, WIDTH = 4, 8, 16


def counts_of(*experts: int) -> np.ndarray:
    return np.bincount(np.array(experts), minlength=EXPERTS)


def test_the_average_is_of_each_layer_and_forgets() -> None:
    predictor = MovingAverage(LAYERS, EXPERTS)
    for _ in range(50):
        predictor.note(2, counts_of(1, 5), None)
    row = predictor.likely.reshape(LAYERS, EXPERTS)
    assert row[2, [1, 5]].min() > 0.8 and np.count_nonzero(row) == 2
    before = row[2, 1]
    predictor.note(2, counts_of(5), None)
    assert row[2, 1] < before < row[2, 5]
    predictor.forget()
    assert not predictor.likely.any() and not predictor.usual.any()


def test_routers_say_who_is_chosen_by_the_same_hidden_states() -> None:
    random = np.random.default_rng(0)
    routers = Routers(random.normal(size=(LAYERS, EXPERTS, WIDTH)).astype(np.float32), 2)
    predictor = PreGate(routers, LAYERS - 1)
    hidden = random.normal(size=(1, WIDTH)).astype(np.float32)
    predictor.note(0, counts_of(0, 1), hidden)
    row = predictor.likely.reshape(LAYERS, EXPERTS)
    for layer in range(1, LAYERS):
        chosen = np.argsort(-(hidden[0] @ routers.weights[layer].T))[:2]
        assert set(np.argsort(-row[layer])[:2]) == set(chosen) and row[layer, chosen].min() > 0.5
        others = np.setdiff1d(np.arange(EXPERTS), chosen)
        assert row[layer, others].max() < 0.5
    before = predictor.likely.copy()
    predictor.note(LAYERS - 1, counts_of(3), hidden)  # nobody is ahead: the average of its own layer, and no more
    assert np.array_equal(before[:-EXPERTS], predictor.likely[:-EXPERTS])


def test_chances_are_half_for_who_is_only_just_chosen() -> None:
    scores = np.array([[[4.0, 3.0, 2.0, 1.0]]])
    chances = choice_chances(scores, 2)[0, 0]
    assert chances[1] > 0.5 > chances[2] and np.isclose(chances[1] + chances[2], 1)
    assert (choice_chances(scores, 4) > 0.99).all()
    assert np.isclose(standardise(scores, 2)[0, 0].sum(), 0)
    assert np.allclose(chance_of_need(np.array([[0.5, 0.0], [0.5, 1.0]])), [0.75, 1.0])
    assert len(thin(np.zeros((1000, 2)))) <= 64 and len(thin(np.zeros((64, 2)))) == 64


def test_a_load_of_50_ms_at_20_ms_a_token_needs_less_than_8_steps_of_lead() -> None:
    assert lead_steps(0.05, 0.02) == 3
    assert lead_steps(0.001, 0.02) == 1 and lead_steps(0.01, 0.01, 4) == 4


def run_period(horizon: Horizon, waited: float = 0.0, loads: int = 1, wasted: int = 0) -> int:
    for _ in range(PERIOD):
        horizon.note(0.01, waited, loads, 0.025 * loads, wasted)
    return horizon.layers


def test_the_horizon_starts_by_the_formula_and_goes_by_one_where_two_periods_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial, "FIRST", 1000)
    horizon = Horizon(6)
    assert run_period(horizon) == 3
    assert run_period(horizon, waited=0.01) == 3 and run_period(horizon, waited=0.01) == 4
    assert run_period(horizon, wasted=1) == 4 and run_period(horizon, waited=0.01) == 4  # they do not agree
    assert run_period(horizon, waited=0.01) == 5
    assert [run_period(horizon, waited=0.01) for _ in range(4)] == [5, 6, 6, 6]
    assert [run_period(horizon, wasted=1) for _ in range(4)] == [6, 5, 5, 4]
    fixed = Horizon(6, 2)
    assert [run_period(fixed, waited=0.1) for _ in range(3)] == [2, 2, 2]


def test_reading_ahead_is_left_out_where_it_does_not_pay() -> None:
    horizon, costs = Horizon(6), {True: 0.02, False: 0.01}
    ahead = []
    for period in range(400):
        if period == 200:
            costs = {True: 0.01, False: 0.02}
        for _ in range(PERIOD):
            horizon.note(costs[horizon.layers > 0], 0.0, 1, 0.025, 0)
        ahead.append(horizon.layers > 0)
    assert sum(ahead[20:200]) < 12 and ahead[:3] == [True] * 3
    assert sum(ahead[300:]) > 95


def test_trials_do_not_follow_noise() -> None:
    found, random = trial.Trial(), np.random.default_rng(0)
    on = []
    for _ in range(1000):
        found.note(float(random.normal(1.0, 0.01)))
        on.append(found.on)
    assert np.mean(on) > 0.95


def test_steady_experts_stand_and_those_in_bursts_do_not() -> None:
    standing = StandingSet(4, 1, 100)
    for period in range(12):
        burst = 90.0 if period % 3 == 0 else 0.0
        chosen = standing.note(np.array([40.0, burst, 5.0, 1.0]), 50)
        assert chosen is (period % 2 == 1)
    assert standing.members.tolist() == [True, False, False, False]
    standing.note(np.array([40.0, 0.0, 42.0, 0.0]), 100)  # hotter for once, and by less than the buffer
    assert standing.members.tolist() == [True, False, False, False]


def test_wishes_are_those_of_the_next_layers_in_their_order_and_replaced() -> None:
    cache, foresight = make_flow_mind(
        lambda: MovingAverage(LAYERS, EXPERTS), ModelShape(LAYERS, EXPERTS, ExpertShape(64, 32)), 6, ForesightOptions(2)
    )
    assert foresight is not None
    likely = foresight.predictor.likely.reshape(LAYERS, EXPERTS)
    likely[1, [2, 3]], likely[2, 4], likely[3, 5] = (0.6, 0.9), 1.0, 1.0
    foresight.wish(0, cache)
    first, victims = foresight.take(cache) or (None, None)
    assert first == EXPERTS + 3 and victims is not None and not len(victims)
    cache.admit(np.array([first]))
    foresight.wish(1, cache)  # layer 1 has run: its expert is not wanted any more
    assert foresight.cancelled == 1
    found = [foresight.take(cache) for _ in range(3)]
    assert [each and each[0] for each in found] == [2 * EXPERTS + 4, 3 * EXPERTS + 5, None]
    foresight.wish(1, cache)
    foresight.drop()
    assert foresight.take(cache) is None and foresight.cancelled == 1  # those on their way are not wished for again


def test_what_is_read_ahead_takes_no_block_of_who_is_worth_more() -> None:
    shape = ModelShape(LAYERS, EXPERTS, ExpertShape(64, 32))
    cache, foresight = make_flow_mind(lambda: MovingAverage(LAYERS, EXPERTS), shape, 2, ForesightOptions(3))
    assert foresight is not None
    likely = foresight.predictor.likely.reshape(LAYERS, EXPERTS)
    likely[1, [0, 1]] = 1.0
    for place in (EXPERTS, EXPERTS + 1):
        assert cache.foresee(place) is not None
        cache.admit(np.array([place]))
    likely[2, 0] = 1.0
    foresight.wish(0, cache)
    assert foresight.take(cache) is None and cache.resident[[EXPERTS, EXPERTS + 1]].all()


def test_how_good_predictions_were_is_counted() -> None:
    foresight = Foresight(MovingAverage(1, EXPERTS), 1, 4)
    foresight.predictor.likely[[1, 2]] = 0.9
    assert foresight.look_at(0, counts_of(2, 3), 1, None).tolist() == [2, 3]
    found = foresight.describe()
    assert found["recall"] == 0.5 and found["precision"] == 0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ForesightOptions(lookahead=-1), "lookahead -1"),
        (ForesightOptions(threshold=0.0), "threshold 0"),
        (ForesightOptions(threshold=float("nan")), "threshold nan"),
        (ForesightOptions(standing_share=1.0), "standing_share 1"),
        (ForesightOptions(standing_tokens=0), "standing_tokens 0"),
    ],
)
def test_knobs_out_of_range_are_refused(options: ForesightOptions, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        options.check()
