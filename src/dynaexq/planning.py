"""How a model would fit and run, before anything of it is loaded: the engine's own plan, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynaexq.core import ModelShape
from dynaexq.formats import tier_rank
from dynaexq.integrations.hub import fetch_headers
from dynaexq.integrations.transformers.families import top_k_of
from dynaexq.integrations.transformers.geometries import geometry_options, make_config
from dynaexq.integrations.transformers.loading import build_skeleton, open_skeleton
from dynaexq.launch import Opened
from dynaexq.launch_options import LaunchOptions
from dynaexq.plan.memory import MemoryPlan, Workload, expert_bytes
from dynaexq.plan.versions import VersionPlan, choose_levels
from dynaexq.policy.hotness import Scores
from dynaexq.policy.ladder import Levels
from dynaexq.policy.selection import pick_hottest
from dynaexq.remedies import Change, find_changes, try_plan
from dynaexq.residency.layout import share_evenly

WORTH, POINTLESS = 1.5, 1.2
"""Full residency over the memory there is: above the first, holding less is worth it; below the second, quantising all
of it or a shorter context does (ExpertFlow, fit)."""

ADVISED_SLACK = 0.1


class Geometry(Opened):
    """A public geometry in place of a model: all its sizes, and no weights."""

    def __init__(self, name: str) -> None:
        """Raises OptionError for an unknown name."""
        self.root, self.store, self.source = Path(name), None, None
        self.skeleton = build_skeleton(make_config(geometry_options(name)))


class Remote(Opened):
    """A model on the hub of which nothing but the configuration and headers are fetched."""

    def __init__(self, model: str) -> None:
        """Raises CheckpointError, UnsupportedModelError."""
        directory, self.tensors = fetch_headers(model)
        self.root, self.store, self.source = Path(model), None, None
        self.skeleton = open_skeleton(directory, len(self.tensors))


class Parameters(NamedTuple):
    """Numbers of weights: of the model, of those that a token goes through, of its parts, and those of the checkpoint
    that do not run (heads that predict further tokens, vision towers)."""

    total: int
    active: int
    experts: int
    embeddings: int
    shared_experts: int
    routers: int
    other: int
    not_loaded: int


@dataclass(frozen=True)
class Outlook:
    """What is known of a run before it starts.

    Args:
        regime: full, dynaexq, or offload where not even the lowest tier fits beside everything else.
        plan: the engine's; None where it would refuse to start, for the `reason`.
        fixed: bytes of everything that is no expert version, by part.
        tiers: bytes of all experts at each tier.
        ratio: everything at the highest tier, over the limit.
        by_tier: shares of traffic; `loss` in nats of KL per token; None where they are not known.
        changes: what would make it fit, each alone.
    """

    name: str
    regime: str
    plan: MemoryPlan | None
    reason: str | None
    limit: int
    fixed: dict[str, int]
    tiers: dict[str, int]
    parameters: Parameters
    ratio: float
    by_tier: dict[str, float] | None
    loss: float | None
    changes: list[Change]

    @property
    def slack(self) -> int | None:
        """Bytes of the limit that the plan leaves."""
        return None if self.plan is None else self.plan.limit - self.plan.total

    @property
    def raised(self) -> float | None:
        """Share of traffic above the lowest tier."""
        return None if self.by_tier is None else 1 - list(self.by_tier.values())[-1] if len(self.by_tier) > 1 else 0.0

    @property
    def bars(self) -> dict[str, dict[str, int]]:
        """Bytes of all parts by name: of the plan, and with all experts at each tier."""
        sizes = {f"all {tier}": nbytes for tier, nbytes in self.tiers.items()}
        if self.plan is not None:
            sizes["the plan"] = self.plan.expert_bytes
        return {name: {**self.fixed, "experts": nbytes} for name, nbytes in sizes.items()}

    @property
    def advice(self) -> str:
        """What the rules of thumb say."""
        if self.ratio <= 1:
            return "everything fits at the highest tier: mode full"
        if self.ratio <= POINTLESS:
            return f"{self.ratio:.2f} times the memory: one lower tier for all, or a shorter context, is simpler"
        worth = "worth it" if self.ratio > WORTH else "may be worth it"
        return f"{self.ratio:.2f} times the memory at the highest tier: holding experts at several tiers is {worth}"


def look_ahead(opened: Opened, options: LaunchOptions, work: Workload, traffic: Scores | None) -> Outlook:
    """Plan a run as the engine would.

    Args:
        traffic: selections by expert, [layers, experts], any scale; None where it is not known.

    Raises:
        OptionError, StoreError: options that conflict, or tiers that are not there.
    """
    shape = opened.skeleton.profile.shape
    plan, reason = try_plan(opened, options, work)
    served = opened.tiers
    sizes = {tier: expert_bytes(shape, tier, opened.group_size) for tier in sorted(served, key=tier_rank)}
    fixed = plan.fixed if plan else opened.fixed(options, work)
    limit = opened.limit(options)
    if options.expert_memory is not None:
        limit = min(limit, sum(fixed.values()) + options.expert_memory)
    expected = None if plan is None or traffic is None else _expect(opened, plan, traffic)
    return Outlook(
        name=str(opened.root),
        regime=_regime(plan),
        plan=plan,
        reason=reason,
        limit=limit,
        fixed=fixed,
        tiers=sizes,
        parameters=count_parameters(opened),
        ratio=(sum(fixed.values()) + max(sizes.values())) / limit,
        by_tier=expected and expected.by_tier,
        loss=expected and expected.loss,
        changes=[] if plan else find_changes(opened, options, work),
    )


def count_parameters(opened: Opened) -> Parameters:
    """Weights of the parts of a model; embeddings are those of tokens, and of the head where it has its own."""
    model, shape = opened.skeleton.model, opened.skeleton.profile.shape
    experts = set(opened.skeleton.layers.parameter_names)
    parts = dict.fromkeys(("embeddings", "shared_experts", "routers", "other"), 0)
    for name, parameter in model.named_parameters():
        if name not in experts:
            parts[_part_of(name)] += parameter.numel()
    dense, active = sum(parts.values()), shape.layers * top_k_of(model.config) * shape.expert.weights
    total = dense + shape.weights
    return Parameters(total, dense + active, shape.weights, **parts, not_loaded=max(0, _stored(opened, total) - total))


def _stored(opened: Opened, total: int) -> int:
    """Weights of the checkpoint; `total` where only a model's own are there."""
    if isinstance(opened, Remote):
        return sum(opened.tensors.values())
    if opened.source is None:
        return total
    return sum(math.prod(entry.shape) for entry in opened.source.checkpoint.tensors.values())


def _part_of(name: str) -> str:
    if "embed_tokens" in name or "lm_head" in name:
        return "embeddings"
    if "shared_expert" in name:
        return "shared_experts"
    return "routers" if name.endswith(("gate.weight", "router.weight", "router.bias")) else "other"


def _regime(plan: MemoryPlan | None) -> str:
    if plan is None or plan.cached:
        return "offload"
    return "full" if plan.mode == "full" else "dynaexq"


class Expected(NamedTuple):
    """Of traffic once experts are where it wants them: shares by tier, and nats of KL per token (None: not known)."""

    by_tier: dict[str, float]
    loss: float | None


def _expect(opened: Opened, plan: MemoryPlan, traffic: Scores) -> Expected:
    known, versions = opened.known, plan.versions
    if versions is None:
        loss = known.predict()[plan.tier] if known and plan.tier in known.tiers else None
        return Expected({plan.tier: 1.0}, loss)
    levels = _settle(opened, versions, traffic)
    counts = np.bincount(levels.ravel(), traffic.ravel(), len(versions.tiers)) / max(traffic.sum(), 1e-30)
    by_tier = dict(zip(versions.tiers, counts.tolist(), strict=True))
    if known is None or not set(versions.tiers) <= set(known.tiers):
        return Expected(by_tier, None)
    places = np.array([known.tiers.index(tier) for tier in versions.tiers])[levels]
    losses = np.take_along_axis(known.losses, places[:, :, None], 2)[:, :, 0]
    per_token = traffic / max(traffic.sum(), 1e-30) * known.traffic.sum()
    return Expected(by_tier, float((per_token * losses).sum()))


def _settle(opened: Opened, versions: VersionPlan, traffic: Scores) -> Levels:
    """Levels [layers, experts] under `traffic` in the long run."""
    pools, known, shape = versions.pools, opened.known, opened.skeleton.profile.shape
    if versions.over_model and known:
        counts = [*pools.slots, shape.layers * shape.experts - pools.raised]
        room = sum(size * count for size, count in zip(pools.sizes, counts, strict=True))
        return choose_levels(known, versions.tiers, pools.sizes, room, traffic)
    groups = 1 if versions.over_model else shape.layers
    hot = pick_hottest(traffic.reshape(groups, -1), share_evenly(pools.raised, groups)).reshape(traffic.shape)
    return np.where(hot, 0, len(pools.sizes) - 1).astype(np.int8)


def active_experts(plan: MemoryPlan, count: int, by_tier: Mapping[str, float] | None) -> dict[str, float]:
    """How many of the `count` experts that a token chooses are at each tier: by traffic, else as if all were alike."""
    if by_tier is not None:
        return {tier: count * share for tier, share in by_tier.items()}
    if plan.versions is None:
        return {plan.tier: float(count)}
    blocks = plan.versions.pools.blocks
    return {tier: count * each / sum(blocks) for tier, each in zip(plan.versions.tiers, blocks, strict=True)}


def zipf_traffic(shape: ModelShape, exponent: float) -> Scores:
    """Traffic [layers, experts] that falls with the rank of experts as 1 / rank^exponent, alike in all layers."""
    ranked: Any = np.arange(1, shape.experts + 1, dtype=np.float64) ** -exponent
    return np.tile(ranked / ranked.sum(), (shape.layers, 1))
