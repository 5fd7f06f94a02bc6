"""The memory plan: what every part of a run needs, and the best tier that fits the limit. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynaexq.core import MemoryLimitError, ModelShape
from dynaexq.formats import VersionLayout, tier_format, tier_rank
from dynaexq.kernels.dense import embedding_bytes, packed_bytes
from dynaexq.plan.versions import VersionPlan, VersionWish, plan_versions
from dynaexq.store.sensitivity import Sensitivity

MIB = 1 << 20
KERNEL_SCRATCH_BYTES = 9 * MIB
"""What a native kernel keeps beside the tokens' own rows (kWaveBytes in native/kernels)."""

OVERHEAD_BYTES = 24 * MIB
OVERHEAD_SHARE = 0.03
OVERHEAD_PER_EXPERT = 1024
"""Thread stacks, allocator slack and small objects: a constant, a share of the dense weights, entries and counters."""


@dataclass(frozen=True)
class ModelProfile:
    """Sizes of a model that its configuration fixes. `*_width` are elements per token; `kv_vectors` are the keys and
    values that `kv_width` is divided into, `kv_layers` the layers that keep some.

    Of `dense_parameters`, those in `matrices` and `embeddings` (rows, columns) can be kept packed.
    """

    shape: ModelShape
    dense_parameters: int
    unpackable_parameters: int
    matrices: tuple[tuple[int, int], ...]
    embeddings: tuple[tuple[int, int], ...]
    hidden: int
    vocabulary: int
    max_context: int
    kv_width: int
    kv_vectors: int
    kv_layers: int
    state_elements: int
    attention_width: int
    dense_width: int
    eager_attention_heads: int


@dataclass(frozen=True)
class Workload:
    """What one forward pass and its sequences amount to, at most.

    Args:
        tokens: tokens of the largest forward pass, all sequences together.
        context: longest sequence in tokens.
        sequences: sequences alive at once.
        logits: positions per forward pass whose logits are computed.
        element_bytes: bytes of one activation or dense weight.
        kv_cache: whether keys and values are kept.
        dense: form of the dense weights (see kernels/dense.py).
        kernel: experts kernel.
        kv_element_bytes, kv_scale_bytes: of a number of a kept key or value, and beside each of them.
    """

    tokens: int
    context: int
    sequences: int
    logits: int
    element_bytes: int
    kv_cache: bool
    dense: str = "full"
    kernel: str = "native"
    kv_element_bytes: int = 4
    kv_scale_bytes: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """A feasible plan: `fixed` parts and `expert_bytes`, together at most `limit` (all in bytes).

    `tier` is that of every expert, or the lowest that experts have; `high` the highest, `versions` how many can be at
    each tier, `room` the bytes that were to be spent on them, and `asked` the tier up to which. Where not all experts
    are resident, `cached` says how many at once.
    """

    mode: str
    tier: str
    limit: int
    fixed: dict[str, int]
    expert_bytes: int
    high: str | None = None
    versions: VersionPlan | None = None
    room: int = 0
    asked: str | None = None
    cached: int = 0

    @property
    def tiers(self) -> str:
        """The tiers of experts, and how many can be above the lowest, for people."""
        if self.cached:
            return f"{self.tier}, {self.cached} resident at once"
        if self.versions is None:
            return self.tier
        pairs = zip(self.versions.tiers, self.versions.pools.slots, strict=False)
        return ", ".join([self.tier, *(f"{count} of them at {tier}" for tier, count in pairs)])

    @property
    def total(self) -> int:
        """Bytes the plan reserves."""
        return sum(self.fixed.values()) + self.expert_bytes


def fixed_parts(profile: ModelProfile, work: Workload, process_bytes: int) -> dict[str, int]:
    """Bytes of everything that is not an expert version, by part (`M_fixed`, dynaexq paper, section 2)."""
    element = work.element_bytes
    dense = dense_bytes(profile, work)
    kv_cache = state = 0
    if work.kv_cache:
        by_token = profile.kv_width * work.kv_element_bytes + profile.kv_vectors * work.kv_scale_bytes
        seen_by_attention = profile.kv_width * element // max(1, profile.kv_layers)  # copies, one layer's at a time
        kv_cache = (by_token * work.sequences + seen_by_attention * gathered(work.sequences)) * work.context
        if profile.eager_attention_heads:
            kv_cache += 2 * profile.attention_width * element * work.context  # again, for every head
        state = profile.state_elements * work.sequences * 4
    expert = profile.shape.expert
    per_token = (
        12 * profile.hidden * element
        + 6 * profile.attention_width * element
        + 3 * profile.dense_width * element
        + (3 * expert.hidden + 6 * expert.intermediate) * 4
    )
    attention = work.tokens * work.context * (element + 3 * 4 * profile.eager_attention_heads)
    scratch = KERNEL_SCRATCH_BYTES if work.kernel == "native" else expert.weights * 4 * 3
    logits = 4 * work.logits * profile.vocabulary * 4
    return {
        "process": process_bytes,
        "dense weights": dense,
        "KV cache": kv_cache + state,
        "activations": work.tokens * per_token + attention + scratch + logits,
        "overhead": OVERHEAD_BYTES
        + int(OVERHEAD_SHARE * dense)
        + OVERHEAD_PER_EXPERT * profile.shape.layers * profile.shape.experts,
    }


def gathered(sequences: int) -> int:
    """Of how many full sequences attention takes copies at once, where it takes any: a fourth, the others wait."""
    return -(-sequences // 4)


def dense_bytes(profile: ModelProfile, work: Workload) -> int:
    """Bytes of all dense weights."""
    if work.dense == "full":
        return profile.dense_parameters * work.element_bytes
    matrices = sum(packed_bytes(work.dense, *shape) for shape in profile.matrices)
    embeddings = sum(embedding_bytes(work.dense, *shape) for shape in profile.embeddings)
    return profile.unpackable_parameters * work.element_bytes + matrices + embeddings


def expert_bytes(shape: ModelShape, tier: str, group_size: int) -> int:
    """Bytes of every expert at `tier`, padding included."""
    return _extent_bytes(shape, tier, group_size) * shape.layers * shape.experts


def _extent_bytes(shape: ModelShape, tier: str, group_size: int) -> int:
    return VersionLayout.of(tier_format(tier, group_size), shape.expert).extent_bytes


def choose_tier(
    shape: ModelShape,
    tiers: Sequence[str],
    group_size: int,
    fixed: dict[str, int],
    memory: int,
    expert_memory: int | None,
    mode: str,
    jitter: int = 0,
) -> MemoryPlan:
    """The highest of `tiers` that fits; `mode` is `auto`, or `full` or `static` with `tiers` narrowed by the caller.

    Raises:
        MemoryLimitError: not even the lowest tier fits; the text says the floor, with the `jitter` bytes by which a
            part that was measured may be larger in the next run.
    """
    ordered = sorted(tiers, key=tier_rank)
    sizes = {tier: expert_bytes(shape, tier, group_size) for tier in ordered}
    base = sum(fixed.values())
    pool = memory - base if expert_memory is None else min(memory - base, expert_memory)
    fitting = [tier for tier in ordered if sizes[tier] <= pool]
    if not fitting:
        lowest = ordered[0]
        raise MemoryLimitError(_explain_floor(lowest, sizes[lowest], fixed, memory, expert_memory, jitter))
    tier = fitting[-1]
    limit = memory if expert_memory is None else min(memory, base + expert_memory)
    chosen = mode if mode != "auto" else "full" if tier == ordered[-1] else "static"
    return MemoryPlan(chosen, tier, limit, fixed, sizes[tier])


def plan_cache(
    shape: ModelShape,
    mode: str,
    tier: str,
    group_size: int,
    fixed: dict[str, int],
    memory: int,
    expert_memory: int | None,
    low: tuple[str, float] | None = None,
) -> MemoryPlan:
    """As many experts at `tier` as fit, the others to be read when they are needed; `low` is a tier of which there are
    versions too, and their share of the bytes.

    Raises:
        MemoryLimitError: not one fits.
    """
    extent, base = _extent_bytes(shape, tier, group_size), sum(fixed.values())
    room = memory - base if expert_memory is None else min(memory - base, expert_memory)
    below = 0
    if low is not None:
        nbytes = _extent_bytes(shape, low[0], group_size)
        below = nbytes * low_capacity(shape, nbytes, max(0, room), low[1])
    slots = min(shape.layers * shape.experts, (room - below) // extent)
    if slots < 1:
        raise MemoryLimitError(
            f"{format_bytes(memory)} leave {format_bytes(max(0, room))} for experts beside {format_bytes(base)} of "
            f"other parts, less than the {format_bytes(extent)} of one at {tier}; raise --memory or --expert-memory"
        )
    limit = memory if expert_memory is None else min(memory, base + expert_memory)
    spent = room if low else slots * extent
    return MemoryPlan(mode, tier, limit, fixed, slots * extent + below, room=spent, cached=slots)


def low_capacity(shape: ModelShape, nbytes: int, room: int, share: float) -> int:
    """How many low versions of `nbytes` a cache has blocks for, in a share of its `room`: one at least."""
    return min(shape.layers * shape.experts, max(1, int(share * room) // nbytes))


def cache_capacity(shape: ModelShape, tier: str, nbytes: int, room: int) -> int:
    """How many experts of `nbytes` at `tier` are resident in `room` bytes. Raises MemoryLimitError for none."""
    if room < nbytes:
        raise MemoryLimitError(
            f"{format_bytes(room)} hold no expert at {tier}, which takes {format_bytes(nbytes)}; raise --expert-memory"
        )
    return min(shape.layers * shape.experts, room // nbytes)


def group_bytes(shape: ModelShape, top_k: int, tokens: int) -> int:
    """What a layer takes whose experts run in groups: every choice's input and output, in float32."""
    return 2 * 4 * tokens * top_k * shape.expert.hidden


def add_high(
    plan: MemoryPlan,
    shape: ModelShape,
    wish: VersionWish,
    group_size: int,
    expert_memory: int | None,
    known: Sensitivity | None,
) -> MemoryPlan | None:
    """`plan` with all room for experts spent between the tiers of `wish`; None where not one fits above the lowest.

    Raises:
        OptionError: see plan_versions.
    """
    room = plan.limit - sum(plan.fixed.values())
    pool = room if expert_memory is None else min(room, expert_memory)
    versions = plan_versions(shape, lambda tier: _extent_bytes(shape, tier, group_size), wish, pool, known)
    if versions.pools.raised == 0:
        return None
    spent = replace(plan, expert_bytes=versions.pools.nbytes, versions=versions, room=pool)
    return replace(spent, mode="dynaexq", tier=wish.low, high=versions.tiers[0], asked=wish.high)


def format_bytes(nbytes: float) -> str:
    """Human-readable size in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _explain_floor(
    tier: str, size: int, fixed: dict[str, int], memory: int, expert_memory: int | None, jitter: int
) -> str:
    if expert_memory is not None and size > expert_memory:
        return (
            f"the expert memory limit {format_bytes(expert_memory)} is below the floor {format_bytes(size)} "
            f"({size} bytes: all experts at {tier}); raise --expert-memory, allow a lower tier, or keep some experts "
            f"on disk (--mode expertflow --tier {tier})"
        )
    floor = sum(fixed.values()) + size + jitter
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in fixed.items())
    return (
        f"the memory limit {format_bytes(memory)} is below the floor {format_bytes(floor)} ({floor} bytes: {parts}, "
        f"experts at {tier} {format_bytes(size)}, {format_bytes(jitter)} to spare); "
        "raise --memory, need less of it (a shorter text or context, fewer slots, --dense int4), allow a lower tier, "
        f"or keep some experts on disk (--mode expertflow --tier {tier})"
    )
