"""What people tell the control loop while it runs: pins, a pause, another mode, less memory or all of it again."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dynaexq.core import ExpertKey, ModelShape, OptionError
from dynaexq.policy import SelectionOptions
from dynaexq.policy.hotness import Scores
from dynaexq.policy.pins import select_beside_pins
from dynaexq.policy.selection import Mask
from dynaexq.residency.layout import Capacity, share_evenly
from dynaexq.residency.resizing import PoolBorder

RUNNING_MODES = ("dynaexq", "static-map", "static")
"""dynaexq: traffic decides; static-map: the hottest at the time of the switch, for good; static: none is high."""


class Steering:
    """Wishes, and the wanted set that follows from them. Changed by the control thread alone (see ControlLoop.steer).

    Every change raises OptionError, and changes nothing, where it cannot be had.
    """

    def __init__(self, shape: ModelShape, border: PoolBorder, options: SelectionOptions) -> None:
        self.mode = RUNNING_MODES[0]
        self.paused = False
        self.pins: dict[ExpertKey, bool] = {}
        self._shape, self._border, self._options = shape, border, options
        self._capacity: Capacity = border.most
        self._fixed: Mask | None = None

    def choose(self, scores: Scores, current: Mask) -> Mask:
        """The wanted high set [layers, experts], from hotness and the set in force or on its way."""
        if self.paused:
            return current
        if self._fixed is not None:
            return self._fixed
        options = None if self.mode == "static-map" else self._options
        wanted = select_beside_pins(scores, current, self._border.wanted, options, *self._masks(self.pins))
        if self.mode == "static-map":
            self._fixed = wanted
        return wanted

    def pause(self, paused: bool) -> None:
        """Start no transition until told otherwise; those under way come to their end."""
        self.paused = paused

    def switch(self, mode: str) -> None:
        """Another of RUNNING_MODES. `static` gives the memory of the high tier back."""
        self._require_motion()
        if mode not in RUNNING_MODES:
            raise OptionError(f"a running model has no mode '{mode}' to switch to; it has {', '.join(RUNNING_MODES)}")
        if mode == "static" and any(self.pins.values()):
            raise OptionError("experts are pinned high; unpin them before the mode 'static'")
        self._border.want(np.zeros_like(self._capacity) if mode == "static" else self._capacity)
        self.mode, self._fixed = mode, None

    def pin(self, keys: Iterable[ExpertKey], high: bool) -> None:
        """Hold experts at the high or the low tier."""
        self._require_motion()
        pins = self.pins | dict.fromkeys(self._known(keys), high)
        if high and self.mode == "static":
            raise OptionError("the mode is 'static', where no expert is high; switch it before pinning one high")
        self._check_pins(pins, self._border.wanted)
        self.pins, self._fixed = pins, None

    def unpin(self, keys: Iterable[ExpertKey]) -> None:
        """Leave experts to traffic again."""
        self._require_motion()
        gone = set(self._known(keys))
        if unknown := sorted(gone - self.pins.keys()):
            raise OptionError(f"expert {unknown[0].expert} of MoE layer {unknown[0].layer} is not pinned")
        self.pins, self._fixed = {key: high for key, high in self.pins.items() if key not in gone}, None

    def resize(self, nbytes: int) -> None:
        """As many high slots as `nbytes` of expert memory afford."""
        self._require_motion()
        if self.mode == "static":
            raise OptionError("the mode is 'static', which uses no more than the low tier; switch it first")
        capacity = share_evenly(self._border.slots_within(nbytes), self._shape.layers)
        self._check_pins(self.pins, capacity)
        self._border.want(capacity)
        self._capacity, self._fixed = capacity, None

    def _require_motion(self) -> None:
        if self.paused:
            raise OptionError("transitions are paused, so this would do nothing; resume them first")

    def _known(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        known = []
        for key in keys:
            if not (0 <= key.layer < self._shape.layers and 0 <= key.expert < self._shape.experts):
                raise OptionError(
                    f"there is no expert {key.expert} of MoE layer {key.layer}: layers are 0 to "
                    f"{self._shape.layers - 1}, experts 0 to {self._shape.experts - 1}"
                )
            known.append(key)
        return known

    def _check_pins(self, pins: dict[ExpertKey, bool], capacity: Capacity) -> None:
        counts = self._masks(pins)[0].sum(1)
        if (counts > capacity).any():
            layer = int((counts > capacity).argmax())
            raise OptionError(
                f"{counts[layer]} experts of MoE layer {layer} would be pinned high, but it has {capacity[layer]} slots"
            )

    def _masks(self, pins: dict[ExpertKey, bool]) -> tuple[Mask, Mask]:
        """Experts pinned high, and pinned low."""
        high, low = (np.zeros((self._shape.layers, self._shape.experts), np.bool_) for _ in range(2))
        for key, is_high in pins.items():
            (high if is_high else low)[key] = True
        return high, low
