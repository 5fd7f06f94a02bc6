"""What predictors of `dynaexq simulate` need of a model: its routers."""

from __future__ import annotations

from pathlib import Path

from dynaexq.core import OptionError
from dynaexq.integrations.transformers.loading import quiet_transformers
from dynaexq.launch import Opened
from dynaexq.policy.prediction import Routers
from dynaexq.predictor.choice import AVERAGE, PREGATE
from dynaexq.predictor.files import read_predictor
from dynaexq.simulate.options import SimulationOptions
from dynaexq.simulate.report import check_trace
from dynaexq.traffic.trace import TraceReader


def read_needed_routers(runs: list[SimulationOptions], reader: TraceReader, store: Path | None) -> Routers | None:
    """Those of the store's model, where a predictor of `runs` over a trace asks them.

    Raises:
        OptionError: one does, and there is no store, or the trace lacks what it looks at.
        SideFileError, StoreError, UnsupportedModelError: a predictor or the store cannot be read.
    """
    for run in runs:
        check_trace(run, reader)
    asking = [name for name in sorted({run.predictor for run in runs if run.predictor}) if _asks(name)]
    if not asking:
        return None
    if store is None:
        raise OptionError(f"--predictor {asking[0]} asks the model's routers; add --store DIR")
    quiet_transformers()
    return Opened(str(store)).routers()


def _asks(name: str) -> bool:
    return name == PREGATE or (name != AVERAGE and read_predictor(Path(name)).head.routers)
