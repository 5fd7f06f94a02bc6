"""What else the control loop listens to: shifts of the workload, decode steps beside copies, and the shadow."""

from __future__ import annotations

from typing import Any

from dynaexq.core import ModelShape
from dynaexq.policy import Hotness
from dynaexq.policy.drift import DriftDetector
from dynaexq.policy.pace import Pace
from dynaexq.shadow import Shadow
from dynaexq.traffic import Traffic


class Signals:
    """Called by the control thread; what is public may be read by any.

    `shadow` corrects what experts are known to lose; `pace` says how fast versions may move. None: this run has not.
    """

    def __init__(
        self, shape: ModelShape, keep_at_shift: float, shadow: Shadow | None = None, pace: Pace | None = None
    ) -> None:
        self.shadow, self.pace = shadow, pace
        self.drift = DriftDetector(shape.layers, shape.experts)
        self.shifts = 0
        self._keep_at_shift, self._shifted = keep_at_shift, False

    def take(self, traffic: Traffic, hotness: Hotness) -> None:
        """Look at traffic before `hotness` takes it in: after a shift, most of that is forgotten."""
        mix = hotness.options.prefill_weight * traffic.prefill + traffic.decode
        if self.drift.observe(mix, hotness.sums):
            self.shifts += 1
            self._shifted = True
            hotness.fade(self._keep_at_shift)
        if self.pace:
            for step in traffic.steps:
                self.pace.note_window(*step)

    def rate(self, now: float, queued_bytes: int) -> float | None:
        """Bytes per second that versions may move with from `now` (seconds) on; None: as it was."""
        if self.pace is None:
            return None
        if self._shifted:
            self.pace.note_shift(now)
            self._shifted = False
        return self.pace.rate(now, queued_bytes)

    def describe(self) -> dict[str, Any]:
        """For people; None for what this run has not."""
        return {
            "shifts": self.shifts,
            "distance": self.drift.distance,
            "threshold": self.drift.threshold,
            "shadow": vars(self.shadow.counts).copy() if self.shadow else None,
            "pace": {"share": self.pace.share, "slowdown": self.pace.slowdown} if self.pace else None,
        }
