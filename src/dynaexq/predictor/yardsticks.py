"""How well routing can be foreseen: what share of the experts that a token chooses is among as many that are named.

All are judged by the same held-out tokens: who is used most (`static`), who was used of late (`average`), what the
routers of later layers say of earlier hidden states (`pregate`), a linear map of hidden states that was fitted to the
other tokens (`linear`), and trained predictors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dynaexq.policy.prediction import HALF_LIFE, Matrix, Routers
from dynaexq.predictor.examples import Examples

NAMED = ("static", "average", "pregate", "linear")
MAX_REACH = 8
RIDGE = 1e-2
"""Of the mean square of hidden states, added for each token."""

HELPS = 0.05
"""Recall that a predictor must add to that of who is used most, or reading ahead by it is not worth the reads."""

Recall = dict[str, list[float | None]]
"""By predictor, for each distance from 1 layer; None where it says nothing."""


def measure_recall(examples: Examples, routers: Routers | None, reach: int, step: Callable[[], None]) -> Recall:
    """Of held-out tokens, mean over layers; distances go on into the next pass. `step` is called for each layer."""
    head, top_k = examples.head, examples.head.top_k
    static, average = _usage(examples), average_routing(examples, HALF_LIFE)
    sums: dict[str, Any] = {name: np.zeros((reach, 2)) for name in NAMED}
    for layer in range(head.layers):
        linear = fit_linear(examples, layer, reach) if examples.hidden is not None else None
        for distance in range(1, reach + 1):
            have, chosen = examples.targets(layer, distance)
            held = examples.held[have]
            have, chosen = have[held], chosen[held]
            target = (layer + distance) % head.layers
            scores = {"static": np.broadcast_to(static[target], (len(have), head.experts))}
            scores["average"] = average[have, target]
            if examples.hidden is not None and linear is not None:
                hidden = examples.hidden[have, layer].astype(np.float32)
                if routers is not None and layer + distance < head.layers:
                    scores["pregate"] = hidden @ routers.weights[target].T
                scores["linear"] = _extend(hidden) @ linear[distance - 1]
            for name, each in scores.items():
                sums[name][distance - 1] += recall(each, chosen, top_k) * len(have), len(have)
        step()
    return {
        name: [float(right / count) if count else None for right, count in each]
        for name, each in sums.items()
        if each[:, 1].any()
    }


def recall(scores: Matrix, chosen: Matrix, count: int) -> float:
    """Share of `chosen` [tokens, top_k] among the `count` experts that score highest, scores [tokens, experts]."""
    if not len(chosen):
        return 0.0
    named = np.argpartition(-scores, count - 1, axis=1)[:, :count] if count < scores.shape[1] else None
    if named is None:
        return 1.0
    return float((chosen[:, :, None] == named[:, None, :]).any(-1).mean())


def fit_linear(examples: Examples, layer: int, reach: int) -> list[Matrix]:
    """Maps [hidden + 1, experts] from what a layer's router gets to who is needed at every distance."""
    assert examples.hidden is not None
    learned = np.flatnonzero(~examples.held)
    given = _extend(examples.hidden[learned, layer].astype(np.float32))
    square = given.T @ given
    square[np.diag_indices_from(square)] += RIDGE * len(given) * float((given**2).mean())
    right = np.zeros((given.shape[1], reach, examples.head.experts), np.float32)
    place_of = np.full(len(examples.ids), -1)
    place_of[learned] = np.arange(len(learned))
    for distance in range(1, reach + 1):
        have, chosen = examples.targets(layer, distance)
        kept = place_of[have] >= 0
        wanted = np.zeros((len(given), examples.head.experts), np.float32)
        wanted[place_of[have[kept]][:, None], chosen[kept]] = 1
        right[:, distance - 1] = given.T @ wanted
    solved = np.linalg.solve(square, right.reshape(len(square), -1)).reshape(right.shape)
    return [solved[:, place] for place in range(reach)]


def judge(found: Recall) -> tuple[str, bool]:
    """What that means for reading ahead, for people, and whether any predictor helps."""
    static = found["static"][0] or 0.0
    best = max((name for name in found if name != "static"), key=lambda name: found[name][0] or 0.0)
    reached = found[best][0] or 0.0
    if reached < static + HELPS:
        return (
            f"no predictor helps here: the best one names {100 * reached:.0f} % of the next layer's experts, and those "
            f"that are used most are {100 * static:.0f} %. Keep what is hot: mode lfu",
            False,
        )
    return (
        f"{best} foresees most: {100 * reached:.0f} % of the next layer's experts ({100 * static:.0f} % without)",
        True,
    )


def _usage(examples: Examples) -> Matrix:
    """How often those learned from chose every expert, [layers, experts]."""
    head, ids = examples.head, examples.ids[~examples.held]
    return np.stack([np.bincount(ids[:, layer].ravel(), minlength=head.experts) for layer in range(head.layers)])


def average_routing(examples: Examples, half_life: float) -> Matrix:
    """The moving average of routing up to every token of a request, [tokens, layers, experts]."""
    head = examples.head
    keep, now = 0.5 ** (1 / half_life), np.zeros((head.layers, head.experts), np.float32)
    found = np.empty((len(examples.ids), *now.shape), np.float16)
    rows = np.arange(head.layers)[:, None]
    for place, ids in enumerate(examples.ids):
        if place and examples.following[place - 1] < 0:
            now[:] = 0
        now *= keep
        now[rows, ids] += 1 - keep
        found[place] = now
    return found


def _extend(hidden: Matrix) -> Matrix:
    return np.concatenate((hidden, np.ones((len(hidden), 1), np.float32)), 1)
