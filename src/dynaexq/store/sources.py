"""What a store is made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dynaexq.core import ExpertKey, ModelShape
from dynaexq.formats import ExpertWeights
from dynaexq.formats.codec import ExpertMetrics
from dynaexq.store.checkpoint import Checkpoint


class ExpertSource(Protocol):
    """Where experts come from: a checkpoint whose expert tensors are understood."""

    checkpoint: Checkpoint
    shape: ModelShape
    layer_names: list[str]
    dense_names: list[str]

    def read(self, key: ExpertKey) -> ExpertWeights:
        """Weights of one expert. Raises CheckpointError."""


class Calibration(Protocol):
    """What experts were given by calibration texts."""

    identity: str
    texts: tuple[str, ...]
    sensitivity: tuple[float, ...]
    """[layers]: nats per token for every unit of noise energy per token in what a layer's experts put out."""

    def metrics(self, key: ExpertKey, weights: ExpertWeights) -> ExpertMetrics:
        """What errors in the matrices of an expert matter. Raises SideFileError or CheckpointError."""

    def selections(self, key: ExpertKey) -> float:
        """How often a token chooses an expert. Raises SideFileError or CheckpointError."""

    def output_error(self, key: ExpertKey, exact: ExpertWeights, restored: ExpertWeights) -> float:
        """Energy of the error that a version of an expert puts into its layer's outputs, per selection.

        Raises as above.
        """

    def peak(self, key: ExpertKey, exact: ExpertWeights) -> float:
        """Largest absolute value in an expert's outputs; 0 where no token chose it. Raises as above."""


Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes or experts done, total)."""
