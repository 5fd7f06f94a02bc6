"""What `dynaexq simulate` prints."""

from __future__ import annotations

from dynaexq.cli.output import stderr
from dynaexq.plan.memory import format_bytes
from dynaexq.simulate.costs import StepCosts
from dynaexq.simulate.report import SimulationReport
from dynaexq.tuning import GIGABYTE


def print_costs(costs: StepCosts) -> None:
    """What passes are taken to cost, and how well that fits those that were timed."""
    for name, line in (("decode", costs.decode), ("prefill", costs.prefill)):
        reading = f" + bytes / {1 / line.byte / GIGABYTE:.1f} GB/s" if line.byte else ""
        fit = ""
        if name in costs.error:
            fit = f"; median error {100 * costs.error[name]:.1f} % over {costs.passes[name]} passes"
        stderr.print(f"{name} pass: {1000 * line.start:.2f} ms + {1000 * line.token:.3f} ms a token{reading}{fit}")


def print_report(report: SimulationReport) -> None:
    """A run, for people."""
    speed = f"{report.seconds:.2f} s: {report.tokens_per_second:.1f} tokens/s"
    print(f"{report.tokens} tokens in {report.passes} passes, {speed}")
    for name, spread in (("TTFT", report.ttft), ("TPOT", report.tpot)):
        if spread:
            mean, p50, p90, p99 = (1000 * value for value in spread)
            print(f"{name}: mean {mean:.1f} ms, p50 {p50:.1f}, p90 {p90:.1f}, p99 {p99:.1f}")
    shares = ", ".join(f"{tier} {100 * share:.1f} %" for tier, share in zip(report.tiers, report.by_tier, strict=True))
    print(f"traffic: {shares}; {format_bytes(report.expert_bytes)} of experts")
    if report.predicted_kl is not None:
        print(f"predicted KL: {report.predicted_kl:.3g} nats per token")
    print(
        f"moves: {report.promotions} promotions, {report.demotions} demotions, {format_bytes(report.bytes_moved)}, "
        f"{report.churn:.1f} for a thousand tokens; {report.waits} waits of {report.wait_seconds:.2f} s in all"
    )
    if report.cache:
        _print_cache(report.cache)
    for each in report.recoveries:
        print(
            f"shift at {each.at:.1f} s: {100 * each.before:.1f} % above the lowest tier, {100 * each.after:.1f} % in "
            f"the end, 90 % of the way after {each.seconds:.2f} s"
        )


def _print_cache(cache: dict[str, float]) -> None:
    reads = cache.get("loads", cache["misses"])
    print(f"cache of {cache['capacity']:.0f} experts: {100 * cache['hit_rate']:.1f} % of needs met, {reads:.0f} reads")
    if "recall" not in cache:
        return
    print(
        f"read ahead: {cache['loads_ahead']:.0f}, of which {cache['useful']:.0f} were needed and {cache['wasted']:.0f} "
        f"given up before; {cache['late']:.0f} needed while they were read, {cache['cancelled']:.0f} wishes cancelled"
    )
    print(
        f"predictions: {100 * cache['recall']:.1f} % of needs, {100 * cache['precision']:.1f} % of them right; "
        f"{100 * cache['hidden']:.1f} % of reading hidden, {cache['horizon']:.0f} layers ahead"
    )
