"""How good a trained predictor is on tokens that were held out: recall at every distance, and whether its chances are
what they say."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from dynaexq.policy.prediction import HALF_LIFE, Matrix, Routers, logistic
from dynaexq.predictor.examples import Examples
from dynaexq.predictor.files import PredictorFile
from dynaexq.predictor.learned import LearnedPredictor
from dynaexq.predictor.windows import WindowNetwork, gather_windows
from dynaexq.predictor.yardsticks import average_routing, recall

BINS = 10
LEAST = 0.05
"""Chances below this are left out of calibration: nearly all experts are that unlikely, and nobody reads them."""

EXPECTED = 0.5


class Judgement(NamedTuple):
    """Of a trained predictor.

    Args:
        recall, recall_double: share of the chosen experts among as many that it names, and among twice as many, for
            each distance from 1 layer.
        precision: share of the experts that it calls likelier than not, at every distance, that are chosen.
        calibration: mean distance of its chances from how often they came true.
        window_recall, window_average: share of the choices of the tokens to come among top_k experts that the network
            over the last tokens names, and that a moving average names; None where no request is long enough.
    """

    recall: list[float]
    recall_double: list[float]
    precision: list[float]
    calibration: float
    window_recall: float | None
    window_average: float | None

    @property
    def looks_back(self) -> bool:
        """Whether the network is worth asking."""
        return (self.window_recall or 0.0) > (self.window_average or 0.0)


def judge_predictor(file: PredictorFile, examples: Examples, routers: Routers | None) -> Judgement:
    """By the held-out tokens of examples that have hidden states."""
    head, predictor = file.head, LearnedPredictor(file, routers)
    assert examples.hidden is not None
    right, double, count = np.zeros(head.reach), np.zeros(head.reach), np.zeros(head.reach)
    hits, said = np.zeros(head.reach), np.zeros(head.reach)
    bins = np.zeros((BINS, 3))
    for layer in range(head.layers):
        held = np.flatnonzero(examples.held)
        chances = predictor.look_ahead(layer, examples.hidden[held, layer].astype(np.float32))
        place_of = np.full(len(examples.ids), -1)
        place_of[held] = np.arange(len(held))
        for distance in range(head.reach):
            have, chosen = examples.targets(layer, distance + 1)
            kept = examples.held[have]
            have, chosen = place_of[have[kept]], chosen[kept]
            scores, came = chances[distance, have], np.zeros((len(have), head.experts), np.bool_)
            np.put_along_axis(came, chosen.astype(np.int64), True, 1)
            right[distance] += recall(scores, chosen, head.top_k) * len(have)
            double[distance] += recall(scores, chosen, min(2 * head.top_k, head.experts)) * len(have)
            count[distance] += len(have)
            hits[distance] += np.count_nonzero(came & (scores > EXPECTED))
            said[distance] += np.count_nonzero(scores > EXPECTED)
            _fill_bins(bins, scores, came)
    known = bins[:, 0] > 0
    errors = np.abs(bins[known, 1] - bins[known, 2])
    return Judgement(
        _divide(right, count),
        _divide(double, count),
        _divide(hits, said),
        float(errors.sum() / max(1.0, bins[:, 0].sum())),
        *_judge_network(file, examples),
    )


def _divide(values: Matrix, counts: Matrix) -> list[float]:
    return [float(value) for value in values / np.maximum(counts, 1)]


def _fill_bins(bins: Matrix, chances: Matrix, came: Any) -> None:
    """Add to how many there are in each bin, their chances, and how many came true."""
    likely = chances >= LEAST
    values, true = chances[likely].ravel(), came[likely].ravel()
    which = np.minimum((values * BINS).astype(np.int64), BINS - 1)
    for column, weights in enumerate((None, values, true)):
        bins[:, column] += np.bincount(which, weights, minlength=BINS)


def _judge_network(file: PredictorFile, examples: Examples) -> tuple[float | None, float | None]:
    head = file.head
    windows = gather_windows(examples, head.window, head.ahead)
    if not windows.held.any():
        return None, None
    given = torch.from_numpy(windows.given[windows.held])
    network = WindowNetwork(head, given)
    network.load(file)
    with torch.no_grad():
        chances = logistic(network.eval()(given).numpy())
    average = average_routing(examples, HALF_LIFE)[windows.ends[windows.held]]
    shape = (len(given), head.layers, head.experts)
    wanted = windows.wanted[windows.held].reshape(shape)
    return _share(chances.reshape(shape), wanted, head.top_k), _share(average, wanted, head.top_k)


def _share(scores: Matrix, wanted: Matrix, count: int) -> float:
    """Of what is wanted [..., experts], at the `count` places that score highest."""
    named = np.argsort(-scores, -1)[..., :count]
    return float(np.take_along_axis(wanted, named, -1).sum() / wanted.sum())
