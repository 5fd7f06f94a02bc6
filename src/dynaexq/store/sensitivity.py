"""What versions of experts lose in outputs, in nats of KL per token: where bytes help most.

Errors that versions add to a layer's outputs are taken for noise that is independent between experts and layers, and
small: predicted KL per token is the sum over experts of selections per token, times the error's energy per selection,
times the sensitivity of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynaexq.core import ExpertKey
from dynaexq.formats import tier_rank
from dynaexq.store.manifest import CalibrationInfo

Floats = np.ndarray[Any, np.dtype[np.float64]]

SUPER_PERCENTILE, SUPER_SHARE, SUPER_FACTOR = 99.5, 0.1, 10.0


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """What versions lose, by calibration.

    `tiers` are all of the store from the lowest up; `losses` float64 [layers, experts, tiers] are nats per selection of
    the expert; `traffic` float64 [layers, experts] selections per token in the calibration texts; `layers` float64
    [layers] nats for a unit of energy that a selection adds to a layer's outputs.
    """

    tiers: tuple[str, ...]
    losses: Floats
    traffic: Floats
    layers: Floats
    super_experts: tuple[ExpertKey, ...]

    def predict(self) -> dict[str, float]:
        """Nats of KL per token with all experts at one tier, for every tier."""
        sums = (self.traffic[..., None] * self.losses).sum((0, 1))
        return dict(zip(self.tiers, sums.tolist(), strict=True))


def make_sensitivity(info: CalibrationInfo, errors: dict[str, list[list[float]]]) -> Sensitivity | None:
    """Put together what a store says: `errors` in outputs [layers][experts] by tier; None if some are empty."""
    if not all(all(layers) for layers in errors.values()) or not any(info.sensitivity):
        return None
    tiers = tuple(sorted(errors, key=tier_rank))
    energies = np.stack([np.array(errors[tier], np.float64) for tier in tiers], -1)
    return Sensitivity(
        tiers,
        energies * np.array(info.sensitivity, np.float64)[:, None, None],
        np.array(info.selections, np.float64),
        np.array(info.sensitivity, np.float64),
        tuple(find_super_experts(np.array(info.peaks, np.float64))),
    )


def find_super_experts(peaks: Floats) -> list[ExpertKey]:
    """The few experts that make activations massive (Su et al., "Unveiling Super Experts in MoE LLMs", 2025).

    Their peaks are above the 99.5th percentile of all, a tenth of the largest, and ten times the median of experts that
    were used at all: a model may have none.

    Args:
        peaks: largest absolute value in each expert's outputs, float64 [layers, experts]; 0 where it was not used.
    """
    used = peaks[peaks > 0]
    if not used.size:
        return []
    floor = max(SUPER_SHARE * peaks.max(), SUPER_FACTOR * np.median(used))
    found = np.argwhere((peaks > np.percentile(peaks, SUPER_PERCENTILE)) & (peaks >= floor))
    return [ExpertKey(int(layer), int(expert)) for layer, expert in found]
