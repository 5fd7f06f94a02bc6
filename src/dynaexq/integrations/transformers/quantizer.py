"""The loading hook: Transformers builds the model and its dense weights, the experts never exist at full size."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from transformers.quantizers import HfQuantizer, register_quantizer

from dynaexq.core import OptionError, StoreError
from dynaexq.formats import TIERS, tier_rank
from dynaexq.formats.base import base_tier, require_standing
from dynaexq.integrations.transformers.config import PAIRED, DynaExqConfig
from dynaexq.integrations.transformers.decoding import speed_up_decoding
from dynaexq.integrations.transformers.dense import DenseLayers, PackOnLoad
from dynaexq.integrations.transformers.experts import IMPLEMENTATION, bind_experts
from dynaexq.integrations.transformers.families import WEIGHTS, ExpertLayers, find_expert_layers
from dynaexq.integrations.transformers.mapped import own_tensors, release_pages
from dynaexq.integrations.transformers.norms import replace_norms
from dynaexq.integrations.transformers.routers import find_routers, set_router_temperature
from dynaexq.integrations.transformers.source import CheckpointExperts, KeyMap, QuantisingExperts
from dynaexq.plan.process import available_memory
from dynaexq.policy.caching import CACHE_MODES, FLOW
from dynaexq.predictor.choice import AVERAGE
from dynaexq.predictor.files import PREDICTOR_NAME
from dynaexq.residency import BudgetTracker, VersionSource
from dynaexq.runtime import ExpertRuntime
from dynaexq.serving import Adaptive, Cached, Serving, serve_adaptive, serve_cached, serve_map, serve_uniform
from dynaexq.store import Checkpoint, ExpertStore
from dynaexq.store.checkpoint import read_shard
from dynaexq.store.manifest import DENSE_NAME
from dynaexq.store.writer import QUANT_METHOD

loading_progress: ContextVar[Callable[[int, int], None]] = ContextVar(
    "loading_progress", default=lambda done, total: None
)
"""Called with (experts loaded, all) during a load; Transformers' own arguments have no room for a callback."""


def runtime_of(model: Any) -> ExpertRuntime:
    """The expert runtime of a model loaded through the plug-in."""
    runtime: ExpertRuntime = model.dynaexq_runtime
    return runtime


@register_quantizer(QUANT_METHOD)
class DynaExqQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads dense weights through Transformers and experts into an arena."""

    requires_calibration = False
    quantized_element_size = 0  # expert parameters take no room in device maps
    quantization_config: DynaExqConfig

    def __init__(self, quantization_config: DynaExqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.from_store: bool = kwargs.get("pre_quantized", True)
        # The dense weights of a store are plain: Transformers must cast and load them like any others. (5.19 would
        # leave renamed tensors of a pre-quantised model in the file's dtype.)
        self.pre_quantized = False

    def is_serializable(self) -> bool:
        """A loaded model is not saved again: the store it came from is its saved form."""
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    def validate_environment(self, *_: Any, device_map: Any = None, **__: Any) -> None:
        """Raise OptionError for placements other than the CPU."""
        places = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        if any(str(place) not in ("None", "cpu", "auto") for place in places):
            raise OptionError(f"device_map {device_map!r}: experts are served on the CPU only")

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        self.layers = find_expert_layers(model)
        self.files = [Path(file) for file in checkpoint_files or [""]]
        root = self.files[0].parent
        if self.from_store:
            self.source: VersionSource = self._open_prepared(model, root)
            surplus: set[str] = set()
        else:
            self.source, surplus = self._open_checkpoint(model, root)
        model.config._experts_implementation = IMPLEMENTATION
        for name, module in self.layers.modules.items():
            for weight in WEIGHTS:
                del module._parameters[weight]
            module._is_hf_initialized = True  # else the model's own initialisation looks for the weights
            surplus |= {f"{name}.{weight}" for weight in WEIGHTS}
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | {f"^{re.escape(key)}$" for key in surplus}
        dense, activations = self.quantization_config.dense, self.quantization_config.activations
        self.dense = None
        if dense != "full":
            self.dense = DenseLayers(
                model, self.layers.shape.experts, dense, activations, partial(release_pages, self.files)
            )

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether a parameter is packed as it is loaded."""
        return self.dense is not None and self.dense.is_placeholder(model, param_name)

    def get_quantize_ops(self) -> Any:
        """What packs it."""
        assert self.dense is not None
        return PackOnLoad(self.dense)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        config = self.quantization_config
        if self.dense:
            self.dense.check_filled(model)
        own_tensors(model, self.files)
        if config.router_temperature != 1:
            set_router_temperature(model, self.layers, config.router_temperature)
        budget = BudgetTracker(config.memory or available_memory())
        for part, nbytes in config.fixed.items():
            budget.reserve(part, nbytes)
        runtime = self._serve(model, budget)
        bind_experts(model, self.layers, runtime)
        if config.kernel == "native":
            replace_norms(model)
            fast = speed_up_decoding(model, self.layers.shape.layers)
            if fast is not None:
                model.dynaexq_decoder = fast.decoder
                runtime.fused_layers = self.layers.shape.layers

    def _serve(self, model: Any, budget: BudgetTracker) -> ExpertRuntime:
        config = self.quantization_config
        serving = Serving(config.mode, self.source, budget, config.kernel, config.activations, loading_progress.get())
        if config.mode in CACHE_MODES:
            assert config.expert_memory is not None
            asked = config.mode == FLOW and self._predictor() != AVERAGE
            routers = find_routers(model, self.layers) if asked else None
            more = self._predictor(), routers, config.low, config.miss_policy
            return serve_cached(serving, Cached(self._tier(), config.expert_memory, config.make_tuning(), *more))
        if config.mode not in PAIRED:
            return serve_uniform(serving, self._tier())
        tiers = self._tier_pair()
        assert config.expert_memory is not None
        if config.mode == "static-map":
            assert config.profile is not None
            return serve_map(serving, tiers, config.expert_memory, Path(config.profile), config.make_tuning().slots)
        names = config.state, config.ranking, config.record, config.replay
        files = (None if name is None else Path(name) for name in names)
        adaptive = Adaptive(tiers, config.expert_memory, config.drive, config.make_tuning(), *files)
        return serve_adaptive(serving, adaptive)

    def _predictor(self) -> str | None:
        """The predictor that was asked for, else the store's own."""
        own = self.source.root / PREDICTOR_NAME if isinstance(self.source, ExpertStore) else None
        return self.quantization_config.predictor or (str(own) if own and own.is_file() else None)

    def _tier_pair(self) -> tuple[str, str]:
        config = self.quantization_config
        high, low = config.high, config.low
        if isinstance(self.source, ExpertStore):
            have = _standing_tiers(self.source)
            high, low = high or have[-1], low or have[0]
        if high is None or low is None:
            raise OptionError(f"mode '{config.mode}' from a checkpoint needs high and low, of {', '.join(TIERS)}")
        if tier_rank(high) <= tier_rank(low):
            raise OptionError(f"the high tier {high} is not above the low tier {low}")
        return high, low

    def _tier(self) -> str:
        config = self.quantization_config
        if not isinstance(self.source, ExpertStore):
            return "bf16" if config.mode == "full" else config.tier or _required_tier()
        have = _standing_tiers(self.source)
        tier = have[-1] if config.mode == "full" else config.tier or have[0]
        require_standing(tier)
        return tier

    def _open_prepared(self, model: Any, root: Path) -> ExpertStore:
        config = self.quantization_config
        if config.store is not None:
            raise OptionError(f"{root} is a store itself; leave out store={config.store!r}")
        config.refuse_quantising_options(str(root))
        store = ExpertStore.open(root)
        _check_store(store, self.layers)
        store.verify_dense()
        missing = KeyMap(model, _tensor_names(root)).missing(self.layers.parameter_names)
        if missing:
            raise StoreError(f"{root} has no weights for {missing[0]} ({len(missing)} missing in all)")
        return store

    def _open_checkpoint(self, model: Any, root: Path) -> tuple[VersionSource, set[str]]:
        config = self.quantization_config
        checkpoint = Checkpoint.open(root)
        experts = CheckpointExperts(model, self.layers, checkpoint)
        surplus = set(checkpoint.tensors) - set(experts.dense_names) - set(experts.unused_names)
        if config.store is None:
            return QuantisingExperts(experts, *config.quantising_options()), surplus
        config.refuse_quantising_options(config.store)
        store = ExpertStore.open(Path(config.store))
        if store.manifest.fingerprint != checkpoint.fingerprint():
            raise StoreError(
                f"{config.store} is a store of another checkpoint ('{store.manifest.source}'), not of {root}"
            )
        _check_store(store, self.layers)
        return store, surplus


def _standing_tiers(store: ExpertStore) -> list[str]:
    """Tiers of a store that are whole by themselves, from the lowest up."""
    return sorted((tier for tier in store.manifest.tiers if base_tier(tier) is None), key=tier_rank)


def _required_tier() -> str:
    raise OptionError(f"mode 'static' from a checkpoint needs a tier: {', '.join(TIERS)}")


def _check_store(store: ExpertStore, layers: ExpertLayers) -> None:
    if store.shape != layers.shape or store.manifest.layer_names != list(layers.modules):
        raise StoreError(f"{store.root} holds experts of another model: {store.shape}, the model has {layers.shape}")


def _tensor_names(root: Path) -> list[str]:
    return list(read_shard(root / DENSE_NAME))
