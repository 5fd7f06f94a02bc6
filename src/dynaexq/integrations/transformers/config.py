"""`DynaExqConfig`: how a model's experts are to be loaded."""

from __future__ import annotations

from typing import Any

from transformers.quantizers import auto, register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from dynaexq.core import OptionError
from dynaexq.formats import DEFAULT_QUANTIZER, tier_format
from dynaexq.formats.base import DEFAULT_GROUP_SIZE
from dynaexq.store.writer import QUANT_METHOD

MODES = ("full", "static", "dynaexq")
STORE_DECIDES = ("group_size", "quantizer")


@register_quantization_config(QUANT_METHOD)
class DynaExqConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Options of one load.

    Args:
        mode: `full` (every expert at the highest tier), `static` (every expert at `tier`), or `dynaexq` (router traffic
            decides which experts are at `high`, all others are at `low`).
        high, low: for `dynaexq`; from a store their defaults are its highest and lowest tier.
        expert_memory: for `dynaexq`: bytes of the expert pools, which decide how many experts can be high.
        drive: for `dynaexq`: `thread`, `replay` or `blocking` (see control.py).
        tier: for `static`: bf16, int8, int4, int2 or int1; default the lowest tier of the store.
        store: directory of a store to take experts from while dense weights come from the checkpoint being
            loaded; not for a prepared directory, which is its own store.
        group_size, quantizer: for loading straight from a checkpoint, quantising on the way.
        memory: cap in bytes on `fixed` parts and experts together; default what the system has available.
        fixed: bytes of other parts of the budget by name, reserved before the experts.
        kernel: experts kernel; `reference`.

    Raises:
        OptionError: unknown or conflicting values.
    """

    def __init__(
        self,
        mode: str = "full",
        tier: str | None = None,
        store: str | None = None,
        group_size: int | None = None,
        quantizer: str | None = None,
        memory: int | None = None,
        fixed: dict[str, int] | None = None,
        kernel: str = "reference",
        high: str | None = None,
        low: str | None = None,
        expert_memory: int | None = None,
        drive: str = "thread",
        **unknown: Any,
    ) -> None:
        unknown.pop("quant_method", None)
        if unknown:
            raise OptionError(f"DynaExqConfig has no option {', '.join(sorted(unknown))}")
        if mode not in MODES:
            raise OptionError(f"unknown mode '{mode}'; known modes are {', '.join(MODES)}")
        if mode == "full" and tier is not None:
            raise OptionError("mode 'full' takes the highest tier there is; a tier goes with mode 'static'")
        if mode == "dynaexq":
            if tier is not None:
                raise OptionError("mode 'dynaexq' takes high and low, not tier")
            if expert_memory is None:
                raise OptionError("mode 'dynaexq' needs expert_memory, which says how many experts can be high")
        elif high or low or expert_memory is not None or drive != "thread":
            raise OptionError(f"high, low, expert_memory and drive go with mode 'dynaexq', not '{mode}'")
        for name in (tier, high, low):
            if name is not None:
                tier_format(name)
        self.quant_method = QUANT_METHOD
        self.mode = mode
        self.tier = tier
        self.store = store
        self.group_size = group_size
        self.quantizer = quantizer
        self.memory = memory
        self.fixed = fixed or {}
        self.kernel = kernel
        self.high = high
        self.low = low
        self.expert_memory = expert_memory
        self.drive = drive

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a config passed to `from_pretrained` overrides in the config of a prepared directory."""
        return {name: value for name, value in vars(self).items() if name != "quant_method"}

    def quantising_options(self) -> tuple[int, str]:
        """Group size and quantiser for quantising on the way."""
        return self.group_size or DEFAULT_GROUP_SIZE, self.quantizer or DEFAULT_QUANTIZER

    def refuse_quantising_options(self, where: str) -> None:
        """Raise OptionError if options are set that experts read from the store at `where` cannot follow."""
        for name in STORE_DECIDES:
            if getattr(self, name) is not None:
                raise OptionError(f"{name} was decided when {where} was prepared; leave it out")


# Without this, Transformers drops a config passed to from_pretrained when the directory carries one of its own.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (DynaExqConfig,)
