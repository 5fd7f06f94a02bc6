"""What a server says of itself, as figures."""

from __future__ import annotations

from dynaexq.cli.top_state import Cache, Percentiles, ServerState
from dynaexq.doctor import Figures, Subject
from dynaexq.doctor.figures import ratio


def describe_server(state: ServerState) -> Figures:
    """Figures of a server's state."""
    steps, moved, parts = state.steps, state.transitions, state.memory.parts
    count, seconds = (steps.count, steps.seconds) if steps else (None, None)
    present = [tier for tier in state.tiers if tier.bits > 0]  # the last of a cache are those that are not loaded
    return Figures(
        subject=Subject(
            kind="server",
            model=state.model,
            layers=len(state.map),
            experts=len(state.map[0]),
            mode=state.mode,
            tier=present[-1].name if present else None,
        ),
        steps=count,
        step_seconds=ratio(seconds, count),
        **_describe_times("step", state.speed.step),
        **_describe_times("queue", state.speed.queue),
        **_describe_times("tpot", state.speed.tpot),
        slots=state.requests.slots,
        running=state.requests.running,
        waiting=state.requests.waiting,
        memory_limit=state.memory.limit,
        memory_used=state.memory.used,
        expert_bytes=state.expert_memory.bytes,
        kv_bytes=parts.get("KV cache"),
        dense_bytes=parts.get("dense weights"),
        activation_bytes=parts.get("activations"),
        failed=moved.failed,
        wait_share=ratio(moved.wait_seconds, seconds),
        **(_describe_cache(state, state.cache) if state.cache else {}),
        **(_describe_moves(state) if state.slots else {}),
    )


def _describe_times(name: str, found: Percentiles | None) -> dict[str, float | None]:
    if found is None:
        return {}
    return {f"{name}_p50": found.p50, f"{name}_p99": found.p99, f"{name}_count": found.count}


def _describe_cache(state: ServerState, cache: Cache) -> dict[str, float | None]:
    steps, moved, needs = state.steps, state.transitions, cache.hits + cache.misses
    count, seconds = (steps.count, steps.seconds) if steps else (None, None)
    computed = None if seconds is None else max(0.0, seconds - moved.wait_seconds)
    per_step = ratio(needs, count)
    return {
        "capacity": cache.capacity,
        "needs": needs,
        "needs_per_step": per_step,
        "needs_per_layer": ratio(per_step, len(state.map)),
        "hit_rate": ratio(cache.hits, needs),
        "late_share": ratio(cache.late, needs),
        "predicted": cache.predicted,
        "recall": cache.recall if needs else None,
        "precision": cache.precision if cache.predicted else None,
        "loads": cache.loads,
        "loads_ahead": cache.loads_ahead,
        "wasted_share": ratio(cache.wasted, cache.loads_ahead),
        "load_seconds": ratio(cache.load_seconds, cache.loads),
        "layer_seconds": ratio(ratio(computed, count), len(state.map)),
        "hidden": cache.hidden if cache.loads else None,
        "link_share": ratio(cache.load_seconds, seconds),
        "link_speed": ratio(moved.bytes_moved, cache.load_seconds),
        "step_bytes": ratio(moved.bytes_moved, count),
        "queued": cache.queued,
        "reading": cache.reading,
        "horizon": cache.horizon,
        "threshold": cache.threshold,
        "standing_share": cache.standing_share,
        "in_flight": cache.in_flight,
    }


def _describe_moves(state: ServerState) -> dict[str, float | None]:
    moved = state.transitions
    moves = moved.promotions + moved.demotions
    experts = sum(tier.experts for tier in state.tiers)
    return {
        "moves": moves,
        "deferred_share": ratio(moved.deferred, moves + moved.deferred),
        "moving": moved.in_flight,
        "reclaiming": moved.reclaiming,
        "high_traffic": state.hot_share_high,
        "high_experts": ratio(experts - state.tiers[-1].experts, experts),
    }
