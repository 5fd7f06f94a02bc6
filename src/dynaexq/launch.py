"""From a model's name to a model in memory: resolve, plan, prepare what the plan calls for, load."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dynaexq.core import MemoryLimitError, OptionError, SideFileError, StoreError
from dynaexq.formats import DEFAULT_QUANTIZER, tier_rank
from dynaexq.formats.base import DEFAULT_GROUP_SIZE, base_tier
from dynaexq.integrations.hub import resolve_model
from dynaexq.integrations.transformers.config import DynaExqConfig
from dynaexq.integrations.transformers.families import top_k_of
from dynaexq.integrations.transformers.loading import Skeleton, load_model, load_tokenizer, open_experts, open_skeleton
from dynaexq.integrations.transformers.quantizer import runtime_of
from dynaexq.integrations.transformers.routers import read_routers
from dynaexq.integrations.transformers.source import CheckpointExperts
from dynaexq.launch_options import CACHED, DTYPES, PAIRED, LaunchOptions
from dynaexq.plan.memory import (
    MemoryPlan,
    Workload,
    add_high,
    choose_tier,
    fixed_parts,
    format_bytes,
    group_bytes,
    plan_cache,
)
from dynaexq.plan.process import available_memory, peak_resident_bytes, resident_bytes
from dynaexq.policy.caching import FLOW
from dynaexq.policy.prediction import Routers
from dynaexq.predictor.choice import predictor_bytes
from dynaexq.predictor.files import PREDICTOR_NAME
from dynaexq.residency.layout import share_evenly
from dynaexq.runtime import ExpertRuntime
from dynaexq.store import MANIFEST_NAME, ExpertStore, PrepareOptions, prepare_store
from dynaexq.store.checkpoint import read_shard
from dynaexq.store.manifest import DENSE_NAME
from dynaexq.store.sensitivity import Sensitivity
from dynaexq.store.sources import Progress
from dynaexq.traffic.trace_recorder import TraceRecorder
from dynaexq.tuning import REGROUPING_KNOBS

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "moe-21m"
DEMO_EXPERT_MEMORY = 16 << 20
"""Between the embedded model's floors: all experts take 6 MiB at int2 and 36 MiB at bf16."""

PROCESS_JITTER = 8 << 20
"""By how much the resident memory of the same start differs from run to run, at most."""

PREPARE_BYTES_PER_WEIGHT = 24
"""Working memory of preparing one expert, per weight: the expert, its float32 form, and the quantiser's copies."""

TRACE_BYTES = 128 << 20
"""Of a run that is recorded: what waits to be written, twice, as it came and as rows, and the writer's own code."""

HIDDEN_TRACE_BYTES = 3 * (128 << 20)
"""More, where what routers are given is recorded too: what waits, the same as rows, and a row group."""

AUTO_TIERS = ("int2", "int2d3", "int3", "int3d4", "int4", "int8", "bf16")
"""Tiers that are made of a checkpoint without being asked for."""


@dataclass(frozen=True)
class Launch:
    """A model that runs within its plan."""

    model: Any
    runtime: ExpertRuntime
    plan: MemoryPlan
    memory: int | None
    dense: str

    def check_memory(self) -> None:
        """Raise MemoryLimitError if the process ever passed the limit it was given."""
        peak = peak_resident_bytes()
        if self.memory is not None and peak > self.memory:
            raise MemoryLimitError(
                f"the process reached {peak} bytes, above the limit of {self.memory}; it stops here. "
                "Give more --memory, or --expert-memory to leave more room beside the experts"
            )

    @property
    def experts_high(self) -> int:
        """Experts that can be above the lowest tier at once."""
        return self.plan.versions.pools.raised if self.plan.versions else 0

    @property
    def _high_by_layer(self) -> list[int]:
        versions = self.plan.versions
        if versions is None or versions.over_model:
            return []
        shares: list[int] = share_evenly(versions.pools.slots[0], self.runtime.experts.shape.layers).tolist()
        return shares

    def report(self) -> dict[str, Any]:
        """The part of the JSON contract that is about memory and versions."""
        experts, counters, versions = self.runtime.experts, self.runtime.counters, self.plan.versions
        return {
            "mode": self.plan.mode,
            **self.runtime.describe_kernel(),
            "dense": self.dense,
            "tier": self.plan.tier,
            "high": self.plan.high,
            "experts_high": self.experts_high,
            "experts_high_by_layer": self._high_by_layer,
            "slots": dict(zip(versions.tiers, versions.pools.slots, strict=False)) if versions else {},
            "slots_shared_by": None if versions is None else "model" if versions.over_model else "layer",
            "budget_bytes": self.plan.limit,
            "device_bytes_peak": self.runtime.budget.peak,
            "rss_peak_bytes": peak_resident_bytes(),
            "expert_bytes": experts.expert_bytes,
            "padding_bytes": experts.padding_bytes,
            "bits_per_expert_weight": experts.bits_per_weight,
            **asdict(counters),
            "hot_share_high": self.runtime.hot_share_high,
            "parts": self.runtime.budget.parts,
            "cache": self.runtime.describe_cache(),
            "signals": self.runtime.control.signals.describe() if self.runtime.control else None,
        }


class Opened:
    """A resolved model, before any weight is loaded."""

    def __init__(self, model: str) -> None:
        """Find `model` and read its configuration.

        Raises:
            CheckpointError, UnsupportedModelError, StoreError: it is not there, or cannot be served.
        """
        self.root = resolve_model(model)
        self.store = ExpertStore.open(self.root) if (self.root / MANIFEST_NAME).exists() else None
        self.source: CheckpointExperts | None = None
        if self.store:
            self.skeleton: Skeleton = open_skeleton(self.root, len(read_shard(self.root / DENSE_NAME)))
        else:
            self.skeleton, self.source = open_experts(self.root)
        self.tokenizer = load_tokenizer(self.root)

    @property
    def group_size(self) -> int:
        """Of quantised versions."""
        return self.store.manifest.group_size if self.store else DEFAULT_GROUP_SIZE

    @property
    def tiers(self) -> tuple[str, ...]:
        """Tiers that can serve by themselves: those of the store, or those that would be made."""
        available = tuple(self.store.manifest.tiers) if self.store else AUTO_TIERS
        return tuple(tier for tier in available if tier != "int1" and not base_tier(tier)) or available

    @property
    def known(self) -> Sensitivity | None:
        """What versions lose, where the store was calibrated."""
        return self.store.sensitivity if self.store else None

    @property
    def fingerprint(self) -> str:
        """Of the checkpoint the model comes from."""
        return self.store.fingerprint if self.store else self.source.checkpoint.fingerprint()  # type: ignore[union-attr]

    def routers(self) -> Routers | None:
        """The weights of its routers, read from disk; None where they are of an unknown form.

        Raises:
            CheckpointError, StoreError: they cannot be read.
        """
        skeleton = self.skeleton
        if self.source:
            checkpoint = self.source.checkpoint
            return read_routers(skeleton.model, skeleton.layers, checkpoint.tensors, checkpoint.read)
        assert self.store is not None
        self.store.verify_dense()
        with safe_open(self.root / DENSE_NAME, "pt") as dense:
            return read_routers(skeleton.model, skeleton.layers, dense.keys(), dense.get_tensor)

    def plan(self, options: LaunchOptions, work: Workload) -> MemoryPlan:
        """Choose mode and tier within the limits, or raise MemoryLimitError with the floor."""
        options.check()
        group_size, fixed, limit = self.group_size, self.fixed(options, work), self.limit(options)
        tiers = self._candidates(options)
        shape = self.skeleton.profile.shape
        if options.mode in CACHED:
            low = None if options.low is None else (options.low, options.make_tuning().low_share)
            return plan_cache(shape, options.mode, tiers[0], group_size, fixed, limit, options.expert_memory, low)
        mode = "auto" if options.mode in ("uniform", *PAIRED) else options.mode
        plan = choose_tier(shape, tiers, group_size, fixed, limit, options.expert_memory, mode, PROCESS_JITTER)
        if options.mode in ("full", "static", "uniform") or (options.mode == "auto" and plan.mode == "full"):
            return plan
        return self._add_high(options, plan, group_size)

    def fixed(self, options: LaunchOptions, work: Workload) -> dict[str, int]:
        """Bytes of everything that is no expert version, by part."""
        work = replace(work, dense=options.dense_form, kernel=options.kernel)
        process = max(resident_bytes(), peak_resident_bytes() if options.memory is not None else 0)
        fixed = fixed_parts(self.skeleton.profile, work, process)
        if options.mode in CACHED:
            top_k = top_k_of(self.skeleton.model.config)
            fixed["expert groups"] = group_bytes(self.skeleton.profile.shape, top_k, work.tokens)
        if options.mode == FLOW:
            own = self.home / PREDICTOR_NAME if self.home else None
            name = options.predictor or (str(own) if own and own.is_file() else None)
            fixed["predictor"] = predictor_bytes(name, self.skeleton.profile.shape)
        trace = TRACE_BYTES + (HIDDEN_TRACE_BYTES if options.trace_hidden else 0)
        return fixed if options.trace is None else {**fixed, "trace": trace}

    def limit(self, options: LaunchOptions) -> int:
        """Bytes that the process may take: what was asked for, else what is there."""
        return options.memory if options.memory is not None else available_memory() + resident_bytes()

    def _add_high(self, options: LaunchOptions, plan: MemoryPlan, group_size: int) -> MemoryPlan:
        """`plan` with higher tiers above its own, where that was asked for or pays."""
        serving, tuning = self._candidates(replace(options, low=None)), options.make_tuning()
        above = [tier for tier in serving if tier_rank(tier) > tier_rank(plan.tier)]
        low, high = plan.tier, options.high
        if self.known and high is None and tuning.slots != "layer" and tuning.layout != "keep":
            low, high = min(serving, key=tier_rank), max(serving, key=tier_rank)
        else:
            high = high or self._nested_in(low, options) or min(above, key=tier_rank, default=None)
        paired = None
        if high is not None:
            wish = tuning.wish(high, low)
            if options.mode == "static-map":
                wish = wish._replace(layout="replace", spare=0, shadow=False)
            shape = self.skeleton.profile.shape
            paired = add_high(plan, shape, wish, group_size, options.expert_memory, self.known)
        if paired:
            return replace(paired, mode="dynaexq" if options.mode == "auto" else options.mode)
        if options.mode == "auto":
            return plan
        if high is None:
            raise OptionError(f"every expert fits at {plan.tier}, the highest tier: use --mode full")
        spare_blocks = f"{tuning.spare} spare blocks and " if tuning.spare else ""
        nearest = options.high or min(above, key=tier_rank, default=high)
        other = "lower spare" if spare_blocks else "give other --high and --low"
        raise MemoryLimitError(
            f"all experts fit at {plan.tier}, but not {spare_blocks}one more at {nearest} beside them; raise the "
            f"limit, use --mode static --tier {plan.tier}, or {other}"
        )

    def _nested_in(self, tier: str, options: LaunchOptions) -> str | None:
        """The tier of the store that refines `tier`, where it can be used."""
        if self.store is None or options.mode == "static-map":
            return None
        return next((name for name in self.store.manifest.tiers if base_tier(name) == tier), None)

    def launch(self, options: LaunchOptions, plan: MemoryPlan, progress: Progress) -> Launch:
        """Prepare the planned tiers into the cache unless they are there, and load them."""
        config = _load_config(options, plan)
        wanted = tuple(dict.fromkeys(tier for tier in (plan.tier, plan.high, options.low) if tier is not None))

        def load(root: Path) -> Any:
            return load_model(root, config, DTYPES[options.dtype], partial(progress, "loading experts"))

        if self.store:
            model = load(self.root)
        else:
            cached = self._cached_store()
            if not _has_tiers(cached, wanted):
                self._prepare(cached, wanted, options.memory, progress)
            try:
                model = load(cached)
            except SideFileError:
                raise
            except StoreError as error:
                warnings.warn(f"{error}; restoring it from the checkpoint", stacklevel=2)
                self._prepare(cached, wanted, options.memory, progress)
                model = load(cached)
        launch = Launch(model, runtime_of(model), plan, options.memory, options.dense_form)
        launch.runtime.mode = plan.mode  # the ablations too, by their names
        if options.trace is not None:
            launch.runtime.trace = self.record(launch.runtime, options.trace, options.trace_hidden)
        model.register_forward_pre_hook(lambda *_: launch.check_memory())
        launch.check_memory()
        return launch

    def record(self, runtime: ExpertRuntime, path: Path, hidden: bool = False) -> TraceRecorder:
        """Begin to write what routers choose, and with `hidden` what they are given."""
        return TraceRecorder(path, self.root.name, self.fingerprint, runtime.experts, hidden)

    def _candidates(self, options: LaunchOptions) -> tuple[str, ...]:
        available = tuple(self.store.manifest.tiers) if self.store else AUTO_TIERS
        serving = self.tiers
        if options.mode in ("static", *CACHED):
            assert options.tier is not None
            if self.store and options.tier not in available:
                raise StoreError(
                    f"{self.root} has no tier {options.tier} (it has {', '.join(available)}); "
                    f"add it with `dynaexq prepare MODEL -o {self.root} --tiers {options.tier}"
                    f"{self.store.manifest.calibration_option}`"
                )
        for tier in (options.low, options.high):
            if self.store and tier is not None and tier not in available:
                raise StoreError(f"{self.root} has no tier {tier} (it has {', '.join(available)})")
        if options.tier is not None:
            return (options.tier,)
        if options.low is not None:
            return (options.low,)
        if options.mode == "full":
            return (max(serving, key=tier_rank),)
        return serving

    @property
    def home(self) -> Path | None:
        """The store that it is served from, which may still have to be made; None for a model that has no weights."""
        if self.store:
            return self.root
        return self._cached_store() if self.source else None

    def _cached_store(self) -> Path:
        assert self.source is not None
        name = re.sub(r"[^\w.-]", "_", self.root.name)
        fingerprint = self.source.checkpoint.fingerprint()[:16]
        return cache_directory() / "stores" / f"{name}-{fingerprint}-{DEFAULT_QUANTIZER}-g{DEFAULT_GROUP_SIZE}"

    def _prepare(self, target: Path, tiers: tuple[str, ...], memory: int | None, progress: Progress) -> None:
        assert self.source is not None
        scratch = PREPARE_BYTES_PER_WEIGHT * self.source.shape.expert.weights
        if memory is not None and resident_bytes() + scratch > memory:
            raise MemoryLimitError(
                f"preparing the model takes {format_bytes(resident_bytes() + scratch)}, above the memory limit "
                f"{format_bytes(memory)}; prepare it first with `dynaexq prepare`, then run the store"
            )
        options = PrepareOptions(tiers, DEFAULT_GROUP_SIZE, DEFAULT_QUANTIZER)
        prepare_store(self.source, target, options, progress, wait_for_lock=True)
        self.source.checkpoint.close()


def _load_config(options: LaunchOptions, plan: MemoryPlan) -> DynaExqConfig:
    common: dict[str, Any] = {
        "memory": plan.limit,
        "fixed": plan.fixed,
        "kernel": options.kernel,
        "activations": options.rounding,
        "dense": options.dense_form,
        "router_temperature": options.router_temperature,
    }
    if plan.mode in CACHED:
        changed = options.make_tuning().changed()
        tuning = {name: value for name, value in changed.items() if name not in REGROUPING_KNOBS}  # the engine's
        common |= {"predictor": options.predictor, "low": options.low, "miss_policy": options.miss_policy}
        return DynaExqConfig(plan.mode, plan.tier, expert_memory=plan.room, tuning=tuning, **common)
    if plan.high is None:
        return DynaExqConfig(mode=plan.mode, tier=plan.tier if plan.mode == "static" else None, **common)
    common |= {"high": plan.asked, "low": plan.tier, "expert_memory": plan.room}
    common |= {"tuning": options.make_tuning().changed()}
    if plan.mode == "static-map":
        return DynaExqConfig(mode="static-map", profile=str(options.profile), **common)
    return DynaExqConfig(
        mode="dynaexq",
        drive=options.moves,
        state=_text(options.state),
        ranking=_text(options.ranking),
        record=_text(options.record),
        replay=_text(options.replay),
        **common,
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _has_tiers(root: Path, tiers: tuple[str, ...]) -> bool:
    """Whether `root` is a store with all of `tiers` complete; what is damaged shows at load."""
    try:
        return set(tiers) <= set(ExpertStore.open(root).manifest.tiers)
    except StoreError:
        return False


def cache_directory() -> Path:
    """Where prepared stores are kept: DYNAEXQ_CACHE, or dynaexq in the user's cache directory."""
    if chosen := os.environ.get("DYNAEXQ_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dynaexq"
