"""Tables of `benchmarks.adaptive`: what is recovered, against what, how fast, and where it is not better."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dynaexq.plan.memory import MIB

SINGLE_MAPS = ("map of text", "map of math", "map of code")
PHASES = ("text", "math", "code")
EXTRAS = ("alpha 0.5", "signal mass", "layout keep")
RECOVERED = 0.9


def render(result: dict[str, Any]) -> str:
    """Markdown of a whole result."""
    tokens = result["passes"] * result["tokens_per_pass"]
    files = "; ".join(f"{name}: {', '.join(each)}" for name, each in result["files"].items())
    lines = [
        f"Stream: {tokens:,} tokens each of text, math, code ({files}), {result['passes']} passes and updates a phase.",
        "KL(bf16 || variant) in 0.001 nats per token over the whole stream; in brackets how much of the gap between "
        "all low and all high is closed.",
        "",
        *table(
            ["high/low, share high", "MiB", "all low", "uniform", "map of text", "of math", "of code", "of stream",
             "**dynaexq**", "plain top-n", "all high"],
            [_quality_row(name, cell) for name, cell in result["cells"].items()],
        ),
        "",
        "Paired difference of loss, dynaexq minus the other, in 0.001 nats per token [95 % interval]; below 0: better.",
        "",
        *table(
            ["high/low, share high", "uniform", *SINGLE_MAPS, "map of stream"],
            [_paired_row(name, cell) for name, cell in result["cells"].items()],
        ),
        "",
        "After warm-up (second half of each phase) against the map calibrated on that very phase (an oracle); passes "
        f"after a shift until {100 * RECOVERED:.0f} % of its final KL gain is back; bytes moved over the stream.",
        "",
        *table(
            ["high/low, share high", *(f"{phase} KL: dynaexq / oracle" for phase in PHASES), "passes: math, code",
             "MiB moved"],
            [_warm_row(name, cell, result["passes"]) for name, cell in result["cells"].items()],
        ),
        "",
        *_variants(result["cells"]),
        *_verdict(result["cells"]),
    ]  # fmt: skip
    return "\n".join(lines)


def recovery_passes(low: list[float], found: list[float], start: int, end: int) -> int | None:
    """Passes from `start` until the KL gain over all-low is back at 90 % of its mean over the phase's second half."""
    gains = [1 - found[at] / low[at] for at in range(start, end)]
    settled = gains[len(gains) // 2 :]
    target = RECOVERED * sum(settled) / len(settled)
    return next((at for at, gain in enumerate(gains) if gain >= target), None)


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield "| " + " | ".join(head) + " |"
    yield "| --- |" + " --: |" * (len(head) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def _kl(cell: dict[str, Any], name: str, part: str = "stream") -> float:
    value: float = cell["quality"][name][part]["kl"]["mean"]
    return value


def _quality_row(name: str, cell: dict[str, Any]) -> list[str]:
    low, high = _kl(cell, "static low"), _kl(cell, "all high")

    def show(variant: str) -> str:
        kl = _kl(cell, variant)
        return f"{1000 * kl:.1f} [{100 * (low - kl) / (low - high):.0f} %]"

    maps = [show(variant) for variant in (*SINGLE_MAPS, "map of stream")]
    uniform = f"{cell['uniform_tier']}: {show('uniform')}"
    online = [f"**{show('dynaexq')}**", show("no-hysteresis")]
    return [name, f"{cell['bytes'] / MIB:.1f}", f"{1000 * low:.1f}", uniform, *maps, *online, f"{1000 * high:.1f}"]


def _paired_row(name: str, cell: dict[str, Any]) -> list[str]:
    return [name, *(_interval(cell["against"][other]) for other in ("uniform", *SINGLE_MAPS, "map of stream"))]


def _interval(against: dict[str, Any]) -> str:
    loss = against["stream"]["loss"]
    text = f"{1000 * loss['mean']:+.1f} [{1000 * loss['low']:+.1f}, {1000 * loss['high']:+.1f}]"
    return f"**{text}**" if loss["high"] < 0 else text


def _warm_row(name: str, cell: dict[str, Any], passes: int) -> list[str]:
    warm = [(_kl(cell, "dynaexq", f"{phase} warm"), _kl(cell, f"map of {phase}", f"{phase} warm")) for phase in PHASES]
    pairs = [f"{1000 * online:.1f} / {1000 * oracle:.1f}" for online, oracle in warm]
    curves = cell["kl_by_pass"]
    back = [
        recovery_passes(curves["static low"], curves["dynaexq"], shift * passes, (shift + 1) * passes)
        for shift in (1, 2)
    ]
    moved = cell["moved_by_pass"]["dynaexq"][-1] / MIB
    return [name, *pairs, ", ".join("never" if each is None else str(each) for each in back), f"{moved:.0f}"]


def _variants(cells: dict[str, Any]) -> Iterator[str]:
    """Other settings, where they were run: paired KL of dynaexq minus theirs."""
    rows = [
        [name, *(_kl_interval(cell["against"][other]) for other in EXTRAS)]
        for name, cell in cells.items()
        if EXTRAS[0] in cell["against"]
    ]
    if rows:
        yield "KL of dynaexq minus that of other settings, in 0.001 nats per token [95 % interval]; below 0: better."
        yield ""
        yield from table(["high/low, share high", *EXTRAS], rows)
        yield ""


def _kl_interval(against: dict[str, Any]) -> str:
    kl = against["stream"]["kl"]
    return f"{1000 * kl['mean']:+.2f} [{1000 * kl['low']:+.2f}, {1000 * kl['high']:+.2f}]"


def _verdict(cells: dict[str, Any]) -> Iterator[str]:
    """Where dynaexq is better by an interval that excludes 0, and where it is not."""
    for measure, title in (("kl", "KL"), ("loss", "Loss")):
        for group, others in (("maps of one workload", SINGLE_MAPS), ("maps of the whole stream", ("map of stream",))):
            signs: dict[str, list[str]] = {"better": [], "undecided": [], "worse": []}
            for name, cell in cells.items():
                for other in others:
                    found = cell["against"][other]["stream"][measure]
                    sign = "better" if found["high"] < 0 else "worse" if found["low"] > 0 else "undecided"
                    signs[sign].append(f"{name} {other.removeprefix('map of ')}")
            texts = [f"{len(signs['better'])} better"]
            texts += [
                f"{len(signs[sign])} {sign} ({'; '.join(signs[sign])})"
                for sign in ("undecided", "worse")
                if signs[sign]
            ]
            yield f"* {title} against {group}: {', '.join(texts)}."
    worse = [name for name, cell in cells.items() if cell["against"]["uniform"]["stream"]["loss"]["low"] > 0]
    if worse:
        yield f"* A uniform tier of the same bytes is better at: {'; '.join(worse)}."
