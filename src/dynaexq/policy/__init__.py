"""Pure decisions on arrays: no threads, no clocks, no torch. Time is an argument."""

from dynaexq.policy.hotness import Hotness, HotnessOptions
from dynaexq.policy.selection import SelectionOptions, pick_hottest, select_high

__all__ = ["Hotness", "HotnessOptions", "SelectionOptions", "pick_hottest", "select_high"]
