"""What people tell the control loop while it runs: pins, a pause, another mode, less memory or all of it again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dynaexq.core import ExpertKey, ModelShape, OptionError
from dynaexq.policy import SelectionOptions
from dynaexq.policy.hotness import Scores
from dynaexq.policy.ladder import Ladder, Levels
from dynaexq.policy.selection import Counts, Mask
from dynaexq.residency.layout import share_evenly
from dynaexq.residency.resizing import PoolBorder, Slots

RUNNING_MODES = ("dynaexq", "static-map", "static")
"""dynaexq: traffic decides; static-map: the hottest at the time of the switch, for good; static: none is high."""


class Steering:
    """Wishes, and the wanted levels that follow from them. Changed by the control thread alone (see ControlLoop.steer).

    Every change raises OptionError, and changes nothing, where it cannot be had.
    """

    def __init__(
        self,
        shape: ModelShape,
        border: PoolBorder,
        options: SelectionOptions,
        drops: Scores | None = None,
        over_model: bool = False,
        super_experts: Sequence[ExpertKey] = (),
    ) -> None:
        """`drops`: see Ladder; `over_model`: all layers share the slots; `super_experts` are high whatever traffic
        says, unless people say otherwise or there is no room."""
        self.mode = RUNNING_MODES[0]
        self.paused = False
        self.drops = drops
        self.pins: dict[ExpertKey, bool] = {}
        self._super_experts = super_experts
        self._shape, self._border, self._options, self._over_model = shape, border, options, over_model
        self._slots: Slots = border.most
        self._fixed: Levels | None = None

    def start(self, hotness: Scores) -> Levels:
        """The levels to begin with, [layers, experts]: every slot is filled, whatever traffic there was."""
        nobody = np.full(hotness.shape, len(self._slots), np.int8)
        return self.ladder.choose(hotness, nobody, None, *self._held())

    def choose(self, hotness: Scores, current: Levels) -> Levels:
        """The wanted levels [layers, experts], from hotness and the levels in force or on their way."""
        if self.paused:
            return current
        if self._fixed is not None:
            return self._fixed
        options = None if self.mode == "static-map" else self._options
        wanted = self.ladder.choose(hotness, current, options, *self._held())
        if self.mode == "static-map":
            self._fixed = wanted
        return wanted

    @property
    def ladder(self) -> Ladder:
        """Slots as they are allowed now, and what ranks experts for them."""
        plan = self._border.plan
        return Ladder(self._share(self._border.wanted), self.drops, plan.held, plan.moved)

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
        self._border.want((0,) * len(self._slots) if mode == "static" else self._slots)
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
        slots = self._border.slots_within(nbytes)
        self._check_pins(self.pins, slots)
        self._border.want(slots)
        self._slots, self._fixed = slots, None

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

    def _share(self, slots: Slots) -> Counts:
        """`slots` [tiers - 1] dealt to the groups that share them, [tiers - 1, groups]."""
        groups = 1 if self._over_model else self._shape.layers
        return np.stack([share_evenly(count, groups) for count in slots])

    def _check_pins(self, pins: dict[ExpertKey, bool], slots: Slots) -> None:
        """Raise OptionError where the highest tier has too few slots for those pinned high, or the others too many."""
        shares, masks = self._share(slots), self._masks(pins)
        groups = shares.shape[1]
        for mask, places, tier, way_out in (
            (masks[0], shares[0], "high, at the highest tier", "pin fewer, or give more expert memory"),
            (masks[1], self._low_places(shares), "low, at the lowest tier", "pin fewer, or give less expert memory"),
        ):
            counts = mask.reshape(groups, -1).sum(1)
            if (counts > places).any():
                group = int((counts > places).argmax())
                where = "" if self._over_model else f" of MoE layer {group}"
                raise OptionError(
                    f"{counts[group]} experts{where} would be pinned {tier}, but {places[group]} can be; {way_out}"
                )

    def _low_places(self, shares: Counts) -> Counts:
        """Experts that can be at the lowest tier, by group: all of them only where low versions stay resident."""
        each = self._shape.layers * self._shape.experts // shares.shape[1]
        return np.full(shares.shape[1], each) - (0 if self._border.plan.keep_low else shares.sum(0))

    def _held(self) -> tuple[Mask, Mask]:
        """Experts to be at the highest and at the lowest tier: those that are pinned, and super experts."""
        high, low = self._masks(self.pins)
        for key in self._super_experts:
            high[key] |= not low[key] and int(high.sum()) < self._border.wanted[0]
        return high, low

    def _masks(self, pins: dict[ExpertKey, bool]) -> tuple[Mask, Mask]:
        """Experts pinned high, and pinned low."""
        high, low = (np.zeros((self._shape.layers, self._shape.experts), np.bool_) for _ in range(2))
        for key, is_high in pins.items():
            (high if is_high else low)[key] = True
        return high, low
