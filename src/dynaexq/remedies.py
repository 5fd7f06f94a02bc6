"""What would make a model fit that does not: smaller parts, other modes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from dynaexq.core import MemoryLimitError
from dynaexq.formats import tier_rank
from dynaexq.launch import Opened
from dynaexq.launch_options import CACHED, LaunchOptions
from dynaexq.plan.memory import MemoryPlan, Workload
from dynaexq.policy.caching import FLOW

Attempt = tuple[str, LaunchOptions, Workload]


class Change(NamedTuple):
    """Something to do otherwise, and the plan that follows."""

    option: str
    plan: MemoryPlan


def try_plan(opened: Opened, options: LaunchOptions, work: Workload) -> tuple[MemoryPlan | None, str | None]:
    """The engine's plan; None where it would refuse to start, and why."""
    try:
        return opened.plan(options, work), None
    except MemoryLimitError as error:
        return None, str(error)


def find_changes(opened: Opened, options: LaunchOptions, work: Workload) -> list[Change]:
    """What would make it fit with all experts resident, and with some."""
    cached = _first(opened, _cached(opened, options, work), "")
    return [*_find_smallest(opened, options, work), *([cached] if cached else [])]


def _find_smallest(opened: Opened, options: LaunchOptions, work: Workload) -> list[Change]:
    """The smallest change of each kind that makes it fit alone; where there is none, changes one after the other."""
    kinds = (_automatic, _denser, _smaller_keys, _fewer_slots, _shorter_contexts)
    alone = [found for kind in kinds if (found := _first(opened, kind(options, work), ""))]
    if alone:
        return alone
    taken = ""
    for kind in kinds:
        attempts = list(kind(options, work))
        if found := _first(opened, iter(attempts), taken):
            return [found]
        if attempts:
            option, options, work = attempts[-1]
            taken += f"{option} "
    return []


def _first(opened: Opened, attempts: Iterator[Attempt], taken: str) -> Change | None:
    """The first attempt that fits, on top of what is `taken`."""
    for option, changed, less in attempts:
        plan, _ = try_plan(opened, changed, less)
        if plan is not None:
            return Change(taken + option, plan)
    return None


def _denser(options: LaunchOptions, work: Workload) -> Iterator[Attempt]:
    forms = ("full", "bf16", "int8", "int4")
    for form in forms[forms.index(options.dense_form) + 1 :] if options.kernel == "native" else ():
        yield f"--dense {form}", replace(options, dense=form), work


def _smaller_keys(options: LaunchOptions, work: Workload) -> Iterator[Attempt]:
    for name, element, scale in (("bfloat16", 2, 0), ("int8", 1, 4)):
        if element < work.kv_element_bytes:
            yield f"--kv-dtype {name}", options, replace(work, kv_element_bytes=element, kv_scale_bytes=scale)


def _fewer_slots(options: LaunchOptions, work: Workload) -> Iterator[Attempt]:
    slots = work.sequences
    while slots > 1:
        slots //= 2
        less = work.sequences - slots
        logits = max(work.logits - less, slots + 1)
        yield f"--slots {slots}", options, replace(work, sequences=slots, tokens=work.tokens - less, logits=logits)


def _shorter_contexts(options: LaunchOptions, work: Workload) -> Iterator[Attempt]:
    context = work.context
    while context >= 1024:
        context //= 2
        yield (
            f"--context {context}",
            options,
            replace(work, context=context, tokens=min(work.tokens, context + work.sequences)),
        )


def _cached(opened: Opened, options: LaunchOptions, work: Workload) -> Iterator[Attempt]:
    if options.mode not in CACHED:
        tier = min(opened.tiers, key=tier_rank)
        yield f"--mode {FLOW} --tier {tier}", replace(_plain(options), mode=FLOW, tier=tier), work


def _plain(options: LaunchOptions) -> LaunchOptions:
    """Without what belongs to a mode."""
    plain = replace(options, mode="auto", tier=None, high=None, low=None, tune={}, profile=None, state=None)
    return replace(plain, ranking=None, record=None, replay=None)


def _automatic(options: LaunchOptions, work: Workload) -> Iterator[Attempt]:
    if options.mode != "auto":
        yield "--mode auto", _plain(options), work
