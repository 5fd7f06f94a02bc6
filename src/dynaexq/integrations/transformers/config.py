"""`DynaExqConfig`: how a model's experts are to be loaded."""

from __future__ import annotations

from typing import Any

from transformers.quantizers import auto, register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from dynaexq.core import OptionError
from dynaexq.formats import DEFAULT_QUANTIZER, tier_format
from dynaexq.formats.base import DEFAULT_GROUP_SIZE
from dynaexq.kernels.base import check_kernel
from dynaexq.kernels.dense import check_dense
from dynaexq.policy.caching import CACHE_MODES, FLOW
from dynaexq.policy.mixing import MISS_POLICIES, WAIT
from dynaexq.policy.prediction import check_router_temperature
from dynaexq.store.writer import QUANT_METHOD
from dynaexq.tuning import Tuning, make_tuning

MODES = ("full", "static", "static-map", "dynaexq", *CACHE_MODES)
PAIRED = ("static-map", "dynaexq")
"""Modes with a high and a low tier."""
STORE_DECIDES = ("group_size", "quantizer")


@register_quantization_config(QUANT_METHOD)
class DynaExqConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Options of one load.

    Args:
        mode: `full` (every expert at the highest tier), `static` (every expert at `tier`), `dynaexq` (router traffic
            decides which experts are at `high`, all others are at `low`), or `static-map` (the experts that `profile`
            says are hottest are at `high` for good).
        high, low: for `dynaexq` and `static-map`; from a store their defaults are its highest and lowest tier.
        expert_memory: for these two: bytes of the expert pools, which decide how many experts can be high.
        profile: for `static-map`: file made by `dynaexq calibrate`.
        drive: for `dynaexq`: `thread`, `replay`, `recorded` or `blocking` (see control.py).
        tuning: for `dynaexq`: values by knob (see tuning.py).
        state: for `dynaexq`: file that keeps hotness over restarts, read if it is there and written as traffic comes.
        ranking: for `dynaexq`: file made by `dynaexq calibrate`, for a first start.
        record: for `dynaexq`: file to write the version map of every window to.
        replay: for the drive `recorded`: such a file, to be followed.
        predictor: for `expertflow`: `average`, `pregate` or a file made by `dynaexq predictor train`; default the
            store's own, else `pregate`, else `average`.
        miss_policy: for `expertflow`: `wait`, or, where experts also have versions at the tier `low`, `low` or `auto`.
        tier: for `static`, `expertflow` and caches that read on need: bf16, int8, int4,
            int3, int2 or int1; default the lowest tier of the store.
        router_temperature: what routers score is divided by it; anything but 1 changes outputs.
        store: directory of a store to take experts from while dense weights come from the checkpoint being
            loaded; not for a prepared directory, which is its own store.
        group_size, quantizer: for loading straight from a checkpoint, quantising on the way.
        memory: cap in bytes on `fixed` parts and experts together; default what the system has available.
        fixed: bytes of other parts of the budget by name, reserved before the experts.
        kernel: experts kernel: `native` or `reference`.
        activations: `int8` or `fp32` (see kernels/native.py); with kernel `native`.
        dense: dense linear layers and embeddings: `full` (torch's, in the model's dtype), or packed as `bf16`,
            `int8` or `int4`; packed with kernel `native`.

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
        kernel: str = "native",
        activations: str = "int8",
        dense: str = "full",
        high: str | None = None,
        low: str | None = None,
        expert_memory: int | None = None,
        profile: str | None = None,
        drive: str = "thread",
        tuning: dict[str, Any] | None = None,
        state: str | None = None,
        ranking: str | None = None,
        record: str | None = None,
        replay: str | None = None,
        predictor: str | None = None,
        miss_policy: str = WAIT,
        router_temperature: float = 1.0,
        **unknown: Any,
    ) -> None:
        unknown.pop("quant_method", None)
        if unknown:
            raise OptionError(f"DynaExqConfig has no option {', '.join(sorted(unknown))}")
        if mode not in MODES:
            raise OptionError(f"unknown mode '{mode}'; known modes are {', '.join(MODES)}")
        if mode == "full" and tier is not None:
            raise OptionError("mode 'full' takes the highest tier there is; a tier goes with mode 'static'")
        pair = {"high": high, "low": None if mode == FLOW else low}
        _check_sizes(mode, tier, expert_memory, pair, tuning)
        maps = {"record": record, "replay": replay}
        adaptive = {"drive": drive != "thread" or None, "state": state, "ranking": ranking, **maps}
        if mode != "dynaexq":
            _refuse(adaptive, mode, "mode 'dynaexq'")
        if mode != FLOW:
            mixed = None if miss_policy == WAIT else miss_policy
            _refuse({"predictor": predictor, "miss_policy": mixed}, mode, f"mode '{FLOW}'")
        elif miss_policy not in MISS_POLICIES or (miss_policy != WAIT) is not (low is not None):
            raise OptionError(f"miss_policy {miss_policy!r}: of {', '.join(MISS_POLICIES)}; all but wait go with low")
        _check_replay(replay, drive)
        check_router_temperature(router_temperature)
        if (mode == "static-map") != (profile is not None):
            raise OptionError("mode 'static-map' and a profile go together")
        for name in (tier, high, low):
            if name is not None:
                tier_format(name)
        check_kernel(kernel, activations)
        check_dense(dense)
        if kernel == "reference" and dense != "full":
            raise OptionError(f"dense {dense!r} needs the native kernel, not 'reference'")
        self.quant_method = QUANT_METHOD
        self.mode = mode
        self.tier = tier
        self.store = store
        self.group_size = group_size
        self.quantizer = quantizer
        self.memory = memory
        self.fixed = fixed or {}
        self.kernel = kernel
        self.activations = activations
        self.dense = dense
        self.high = high
        self.low = low
        self.expert_memory = expert_memory
        self.profile = profile
        self.drive = drive
        self.tuning = tuning or {}
        self.state, self.ranking = state, ranking
        self.record, self.replay = record, replay
        self.predictor, self.miss_policy = predictor, miss_policy
        self.router_temperature = router_temperature
        self.make_tuning()

    def make_tuning(self) -> Tuning:
        """The knobs in force. Raises OptionError for unknown, impossible or useless ones."""
        return make_tuning(self.tuning, self.mode if self.mode in ("static-map", *CACHE_MODES) else self.drive)

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


def _check_sizes(
    mode: str, tier: str | None, expert_memory: int | None, pair: dict[str, Any], tuning: dict[str, Any] | None
) -> None:
    """Raise OptionError unless tiers and bytes are those that a mode takes."""
    if mode in CACHE_MODES:
        _refuse(pair, mode, "modes 'dynaexq' and 'static-map'")
        if expert_memory is None or tier is None:
            raise OptionError(f"mode '{mode}' needs a tier, and expert_memory, which says how many experts it holds")
    elif mode in PAIRED:
        if tier is not None:
            raise OptionError(f"mode '{mode}' takes high and low, not tier")
        if expert_memory is None:
            raise OptionError(f"mode '{mode}' needs expert_memory, which says how many experts can be high")
    else:
        useless = pair | {"expert_memory": expert_memory, "tuning": tuning}
        _refuse(useless, mode, "modes 'dynaexq' and 'static-map'")


def _check_replay(replay: str | None, drive: str) -> None:
    if (replay is not None) != (drive == "recorded"):
        raise OptionError("replay and the drive 'recorded' go together")


def _refuse(values: dict[str, Any], mode: str, other: str) -> None:
    """Raise OptionError if any of the named values is set."""
    if wrong := [name for name, value in values.items() if value]:
        raise OptionError(f"{' and '.join(wrong)} go with {other}, not '{mode}'")


# Without this, Transformers drops a config passed to from_pretrained when the directory carries one of its own.
auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (DynaExqConfig,)
