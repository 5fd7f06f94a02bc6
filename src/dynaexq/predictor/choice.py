"""From a predictor's name, or its file, to a predictor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dynaexq.core import ModelShape, OptionError
from dynaexq.policy.prediction import MovingAverage, Predictor, PreGate, Routers
from dynaexq.predictor.files import load_predictor
from dynaexq.predictor.learned import LearnedPredictor

AVERAGE, PREGATE = "average", "pregate"
NAMES = (AVERAGE, PREGATE)
REACH = 4
"""Layers that `pregate` looks ahead: what routers say further ahead is hardly better than an average."""


def pick_predictor(
    name: str | None, routers: Routers | None, shape: ModelShape, fingerprint: str
) -> Callable[[], Predictor]:
    """What makes the predictor called `name`, or that is in the file `name`; None: the best that needs no training.

    Raises:
        OptionError: the model's routers are of a form that `pregate` does not know.
        SideFileError: the file is damaged, or of another model.
    """
    if name == AVERAGE or (name is None and routers is None):
        return lambda: MovingAverage(shape.layers, shape.experts)
    if name in (None, PREGATE):
        if routers is None:
            raise OptionError(f"predictor {PREGATE}: the routers of this model are of an unknown form; use {AVERAGE}")
        return lambda: PreGate(routers, min(REACH, shape.layers - 1))
    assert name is not None
    file = load_predictor(Path(name), fingerprint, shape)
    if file.head.routers and routers is None:
        raise OptionError(f"predictor {name} corrects what the model's routers say, and they are not known here")
    return lambda: LearnedPredictor(file, routers)


def predictor_bytes(name: str | None, shape: ModelShape) -> int:
    """What a predictor takes: the routers of all layers in float32, where it asks them, and its file."""
    if name == AVERAGE:
        return 0
    routers = 4 * shape.layers * shape.experts * shape.expert.hidden
    return routers if name in (None, PREGATE) else routers + Path(name).stat().st_size


def check_predictor(name: str) -> None:
    """Raise OptionError unless `name` is a predictor's, or a file."""
    if name not in NAMES and not Path(name).is_file():
        raise OptionError(
            f"--predictor {name}: not {' or '.join(NAMES)}, and no file; `dynaexq predictor train` makes files"
        )
