"""What `dynaexq plan` prints, and its JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from dynaexq.core import ModelShape
from dynaexq.plan.memory import MemoryPlan, format_bytes
from dynaexq.plan.speed import SpeedBand
from dynaexq.planning import ADVISED_SLACK, Outlook
from dynaexq.residency.layout import share_evenly


def print_outlook(outlook: Outlook, shape: ModelShape, source: str | None, speed: SpeedBand | None) -> None:
    """A plan, for people."""
    numbers = outlook.parameters._asdict()
    parts = {name.replace("_", " "): _count(number) for name, number in numbers.items() if number}
    print(f"{outlook.name}: {shape.layers} MoE layers of {shape.experts} experts")
    print("parameters: " + ", ".join(f"{name} {number}" for name, number in parts.items()))
    console = Console(highlight=False, soft_wrap=True)
    table = Table("part", "bytes", "of the limit", box=None)
    rows = dict(outlook.fixed)
    if outlook.plan:
        rows[f"experts: {outlook.plan.tiers}"] = outlook.plan.expert_bytes
        rows["left"] = outlook.slack or 0
    for name, nbytes in rows.items():
        table.add_row(name, format_bytes(nbytes), f"{100 * nbytes / outlook.limit:.1f} %")
    table.add_row("limit", format_bytes(outlook.limit), "")
    console.print(table)
    sizes = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in outlook.tiers.items())
    print(f"all experts at one tier: {sizes}")
    print(outlook.advice)
    if outlook.plan is None:
        _print_changes(outlook)
        return
    print(f"mode {outlook.plan.mode}{_describe_slots(outlook.plan, shape)}")
    if outlook.plan.versions is None and (outlook.slack or 0) < ADVISED_SLACK * outlook.limit:
        print(f"less than {ADVISED_SLACK:.0%} of the limit is left")
    if outlook.raised is not None:
        loss = "" if outlook.loss is None else f", predicted KL {outlook.loss:.3g} nats per token"
        print(f"{100 * outlook.raised:.1f} % of traffic above the lowest tier, by {source}{loss}")
    if speed:
        print(
            f"decode of one sequence: {speed.low:.1f} to {speed.high:.1f} tokens/s "
            f"({format_bytes(speed.bytes_per_token)} a token), before attention over long contexts"
        )
    elif outlook.plan.cached:
        print("speed: as many needs as the cache meets; `dynaexq simulate` says, from a trace (docs/offload.md)")
    else:
        print("speed: not known; `dynaexq probe --json probe.json` measures this machine, then --probe probe.json")


def describe_outlook(
    outlook: Outlook, shape: ModelShape, source: str | None, speed: SpeedBand | None
) -> dict[str, Any]:
    """A plan, for machines."""
    return {
        "model": outlook.name,
        "layers": shape.layers,
        "experts": shape.experts,
        "parameters": outlook.parameters._asdict(),
        "regime": outlook.regime,
        "limit": outlook.limit,
        "fixed": outlook.fixed,
        "tiers": outlook.tiers,
        "ratio": outlook.ratio,
        "advice": outlook.advice,
        "plan": None if outlook.plan is None else _describe_plan(outlook.plan, shape),
        "slack": outlook.slack,
        "reason": outlook.reason,
        "traffic": source,
        "raised": outlook.raised,
        "predicted_kl": outlook.loss,
        "speed": speed and speed._asdict(),
        "changes": {change.option: _describe_plan(change.plan, shape) for change in outlook.changes},
    }


def _describe_plan(plan: MemoryPlan, shape: ModelShape) -> dict[str, Any]:
    versions = plan.versions
    return {
        "mode": plan.mode,
        "tier": plan.tier,
        "high": plan.high,
        "expert_bytes": plan.expert_bytes,
        "cached": plan.cached,
        "total": plan.total,
        "slots": dict(zip(versions.tiers, versions.pools.slots, strict=False)) if versions else {},
        "slots_by_layer": _by_layer(plan, shape),
        "pools": asdict(versions.pools) if versions else None,
    }


def _by_layer(plan: MemoryPlan, shape: ModelShape) -> list[int]:
    versions = plan.versions
    if versions is None or versions.over_model:
        return []
    shares: list[int] = share_evenly(versions.pools.slots[0], shape.layers).tolist()
    return shares


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.1f} M"


def _describe_slots(plan: MemoryPlan, shape: ModelShape) -> str:
    by_layer = _by_layer(plan, shape)
    if by_layer:
        of_layer = f"{min(by_layer)} to {max(by_layer)} of {shape.experts} experts of a layer"
        return f": {of_layer} at {plan.high}, others at {plan.tier}"
    return f", experts at {plan.tiers}"


def _print_changes(outlook: Outlook) -> None:
    print("it does not fit")
    for change in outlook.changes:
        print(f"with {change.option} it would: {change.plan.mode}, experts at {change.plan.tiers}")
    least = sum(outlook.fixed.values()) + min(outlook.tiers.values())
    print(f"with --memory {-(-least // (1 << 20)) + 8}M it would, with all experts at the lowest tier")
