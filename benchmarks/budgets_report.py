"""Tables of `benchmarks.budgets`: KL at equal bytes, what each step brings, targets, traffic and recovery."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from benchmarks.adaptive_report import PHASES, SINGLE_MAPS, recovery_passes, table
from dynaexq.plan.memory import MIB

STEPS = {"paper": "the paper's way: rtn, two tiers, equal slots", "als-gain": "als-gain", "fitted": "fitted versions"}
BEST = "all tiers"


def render(result: dict[str, Any]) -> str:
    """Markdown of a whole result."""
    tokens = result["passes"] * result["tokens_per_pass"]
    files = "; ".join(f"{name}: {', '.join(each)}" for name, each in result["files"].items())
    lines = [
        f"Stream: {tokens:,} tokens each of text, math, code ({files}), {result['passes']} passes and updates a phase.",
        "KL(bf16 || method) in 0.001 nats per token over the whole stream; every row has the same expert bytes.",
        "",
        *table(
            ["bits", "MiB", "uniform", *STEPS.values(), "**all tiers over the model**", *SINGLE_MAPS, "of stream"],
            [_budget_row(result, bits) for bits in result["bits"]],
        ),
        "",
        "KL of `all tiers` over each phase beside the best static map of another workload, and, in "
        "its second half, beside the map of that very workload (an oracle).",
        "",
        *table(
            ["bits", *(f"{phase}: online / best other map" for phase in PHASES),
             *(f"{phase} warm: online / oracle" for phase in PHASES)],
            [_target_row(result, bits) for bits in result["bits"]],
        ),
        "",
        "Traffic: MiB moved over the stream, and passes after a shift until 90 % of the final KL gain over the map of "
        "text is back (math, code); MiB for every 0.001 nats that the two have won over it.",
        "",
        *table(
            ["method", "KL", "perplexity", "MiB moved", "passes until 90 %", "MiB / 0.001 nats"],
            [row for bits in result["bits"] for row in _traffic_rows(result, bits)],
        ),
        "",
        *_verdict(result),
    ]  # fmt: skip
    return "\n".join(lines)


def best_uniform(result: dict[str, Any], bits: float) -> str:
    """The uniform method with the least KL that needs no more bits."""
    fitting = [name for name in result["methods"] if name.startswith("uniform") and _bits(result, name) <= bits + 1e-9]
    return min(fitting, key=lambda name: kl(result, name))


def kl(result: dict[str, Any], name: str, part: str = "stream") -> float:
    """Nats per token."""
    value: float = result["methods"][name]["quality"][part]["kl"]["mean"]
    return value


def _bits(result: dict[str, Any], name: str) -> float:
    value: float = result["methods"][name]["bits"]
    return value


def _show(value: float) -> str:
    return f"{1000 * value:.3g}"


def _budget_row(result: dict[str, Any], bits: float) -> list[str]:
    uniform = best_uniform(result, bits)
    tier = uniform.removeprefix("uniform ")
    maps = [_show(kl(result, f"{bits:g} {name}")) for name in (*SINGLE_MAPS, "map of stream")]
    steps = [_show(kl(result, f"{bits:g} {name}")) for name in STEPS]
    mib = bits * result["weights"] / 8 / MIB
    best = f"**{_show(kl(result, f'{bits:g} {BEST}'))}**"
    return [f"{bits:g}", f"{mib:.1f}", f"{tier}: {_show(kl(result, uniform))}", *steps, best, *maps]


def _other_map(result: dict[str, Any], bits: float, phase: str) -> float:
    return min(kl(result, f"{bits:g} {name}", phase) for name in SINGLE_MAPS if name != f"map of {phase}")


def _target_row(result: dict[str, Any], bits: float) -> list[str]:
    online = f"{bits:g} {BEST}"
    shifted = [f"{_show(kl(result, online, phase))} / {_show(_other_map(result, bits, phase))}" for phase in PHASES]
    warm = [
        f"{_show(kl(result, online, part))} / {_show(kl(result, f'{bits:g} map of {phase}', part))}"
        for phase in PHASES
        for part in (f"{phase} warm",)
    ]
    return [f"{bits:g}", *shifted, *warm]


def _traffic_rows(result: dict[str, Any], bits: float) -> Iterator[list[str]]:
    first = f"{bits:g} map of text"
    for name, method in result["methods"].items():
        if not name.startswith(f"{bits:g} ") or not method["moved_by_pass"][-1]:
            continue
        curve, still = method["kl_by_pass"], result["methods"][first]["kl_by_pass"]
        passes = result["passes"]
        back = [recovery_passes(still, curve, shift * passes, (shift + 1) * passes) for shift in (1, 2)]
        shown = ", ".join("never" if each is None else str(each) for each in back)
        loss = method["quality"]["stream"]["loss"]["mean"]
        moved = method["moved_by_pass"][-1] / MIB
        won = 1000 * sum(kl(result, first, phase) - kl(result, name, phase) for phase in PHASES[1:]) / 2
        price = f"{(moved - method['moved_by_pass'][passes - 1] / MIB) / won:.0f}" if won > 0 else ""
        yield [name, _show(kl(result, name)), f"{math.exp(loss):.3f}", f"{moved:.0f}", shown, price]


def _verdict(result: dict[str, Any]) -> Iterator[str]:
    """Where the targets are met, and where not."""
    worse, far = [], []
    for bits in result["bits"]:
        online = f"{bits:g} {BEST}"
        for phase in PHASES:
            if kl(result, online, phase) > (other := _other_map(result, bits, phase)):
                worse.append(f"{bits:g} bits {phase} ({kl(result, online, phase) / other - 1:+.0%})")
            oracle = kl(result, f"{bits:g} map of {phase}", f"{phase} warm")
            if (ratio := kl(result, online, f"{phase} warm") / oracle) > 1.1:
                far.append(f"{bits:g} bits {phase} ({ratio - 1:+.0%})")
    count = len(result["bits"]) * len(PHASES)
    yield f"* Never worse than the best map of another workload: {count - len(worse)} of {count}{_list(worse)}"
    yield f"* At most 10 % above the same workload's oracle, warmed up: {count - len(far)} of {count}{_list(far)}"
    for bits in result["bits"]:
        nested, pair = (result["methods"].get(f"{bits:g} {name}") for name in ("nested", "pair"))
        if nested and pair:
            ratio = nested["moved_by_pass"][-1] / pair["moved_by_pass"][-1]
            yield (
                f"* At {bits:g} bits int4+4 over int4 moves {1 - ratio:.0%} less than int8 against int4, at KL "
                f"{_show(kl(result, f'{bits:g} nested'))} and {_show(kl(result, f'{bits:g} pair'))}."
            )


def _list(names: list[str]) -> str:
    return f" (not: {'; '.join(names)})." if names else "."
