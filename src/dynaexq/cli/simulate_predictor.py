"""What predictors of `dynaexq simulate` need of a model: its routers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dynaexq.core import OptionError
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import Opened
from dynaexq.policy.prediction import Routers
from dynaexq.predictor.choice import AVERAGE, PREGATE
from dynaexq.predictor.files import read_predictor
from dynaexq.simulate.options import SimulationOptions


def read_needed_routers(runs: Iterable[SimulationOptions], store: Path | None) -> Routers | None:
    """Those of the store's model, where a predictor of `runs` asks them.

    Raises:
        OptionError: one does, and there is no store.
        SideFileError, StoreError, UnsupportedModelError: a predictor or the store cannot be read.
    """
    asking = [name for name in {run.predictor for run in runs} if name is not None and _asks(name)]
    if not asking:
        return None
    if store is None:
        raise OptionError(f"--predictor {asking[0]} asks the model's routers; add --store DIR")
    quiet_transformers()
    return Opened(str(store)).routers()


def _asks(name: str) -> bool:
    return name == PREGATE or (name != AVERAGE and read_predictor(Path(name)).head.routers)
