"""Every check, where it is content, where it is not, and where it has seen too little."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import dynaexq.doctor
from dynaexq.cli.app import app
from dynaexq.doctor import CHECKS, Figures, Status, Subject, Verdict, examine
from dynaexq.doctor.figures import UNITS, ratio
from dynaexq.launch_options import MODES
from dynaexq.tuning import KNOBS, make_tuning, parse_tuning

Json = dict[str, Any]
CACHE: Json = {"capacity": 60, "expert_bytes": 60 << 20, "horizon": 2, "steps": 500, "needs": 5000, "loads": 500}
CACHE |= {"wait_share": 0.3, "threshold": 0.5, "standing_share": 0.0, "in_flight": 4, "needs_per_step": 40}
LINK: Json = {**CACHE, "step_bytes": 1e6, "link_speed": 1e8}
MOVES: Json = {"moves": 100, "steps": 500, "expert_bytes": 60 << 20}
SERVER: Json = {"slots": 4, "steps": 500, "expert_bytes": 60 << 20}
TRACE_CHECKS = ("routing", "skew", "repetition", "stability", "spread")
TRACE: Json = {"tokens": 5000, "selections": 100.0}


class Case:
    """Figures with which a check says so, and words of its advice."""

    def __init__(self, check: str, status: str, base: Json, advice: str = "", mode: str = "expertflow", **own: Any):
        self.check, self.status, self.advice = check, Status(status), advice
        kind = "trace" if check in TRACE_CHECKS else "server"
        self.figures = make(kind, None if kind == "trace" else mode, **{**base, **own})


def make(kind: Any = "server", mode: str | None = "expertflow", tier: str | None = "int4", **values: Any) -> Figures:
    return Figures(subject=Subject(kind=kind, model="m", layers=6, experts=32, mode=mode, tier=tier), **values)


CASES = [
    Case("prediction", "good", CACHE, recall=0.9, precision=0.7),
    Case("prediction", "look", CACHE, "dynaexq predictor train STORE --traces FILE", recall=0.7, precision=0.7),
    Case("prediction", "bad", CACHE, "dynaexq predictor train", recall=0.3, precision=0.7),
    Case("prediction", "unknown", CACHE, recall=0.3, needs=999),
    Case("hits", "good", CACHE, hit_rate=0.85),
    Case("hits", "look", CACHE, "--tune standing_share=0.2", hit_rate=0.7, recall=0.9),
    Case("hits", "look", CACHE, "--expert-memory 90M", hit_rate=0.7, recall=0.9, standing_share=0.2),
    Case("hits", "bad", CACHE, "--expert-memory 90M", hit_rate=0.2, recall=0.9, needs_per_step=100),
    Case("hits", "bad", CACHE, "--expert-memory 90M", hit_rate=0.2, recall=0.5),
    Case("hits", "bad", CACHE, "--mode lfu", hit_rate=0.2, horizon=None, mode="lru"),
    Case("hits", "bad", CACHE, "--mode expertflow", hit_rate=0.2, horizon=None, mode="lfu"),
    Case("hits", "unknown", CACHE, hit_rate=0.2, needs=10),
    Case("hidden", "good", CACHE, hidden=0.85),
    Case("hidden", "good", CACHE, hidden=0.1, wait_share=0.01),
    Case("hidden", "look", CACHE, "--tune lookahead=3", hidden=0.6, late_share=0.2),
    Case("hidden", "look", CACHE, "--tune threshold=0.3", hidden=0.6, wasted_share=0.1),
    Case("hidden", "bad", CACHE, "--tune in_flight=8", hidden=0.1, wasted_share=0.3),
    Case("hidden", "bad", CACHE, "--expert-memory 90M", hidden=0.1, link_share=1.2),
    Case("hidden", "bad", CACHE, "--expert-memory 90M", hidden=0.1, horizon=0),
    Case("hidden", "bad", CACHE, "--mode expertflow", hidden=0.1, horizon=None, mode="lfu"),
    Case("hidden", "unknown", CACHE, hidden=0.1, loads=99),
    Case("hidden", "unknown", CACHE, loads=0),
    Case("late", "good", CACHE, late_share=0.01),
    Case("late", "look", CACHE, "--tune lookahead=3", late_share=0.1),
    Case("late", "bad", CACHE, "--expert-memory", late_share=0.2, link_share=1.0),
    Case("late", "bad", CACHE, "--expert-memory", late_share=0.2, horizon=6),
    Case("late", "unknown", CACHE, late_share=0.2, needs=10),
    Case("waste", "good", CACHE, wasted_share=0.1, loads_ahead=200),
    Case("waste", "look", CACHE, "--tune threshold=0.7", wasted_share=0.3, loads_ahead=200),
    Case("waste", "bad", CACHE, "--tune threshold=0.9", wasted_share=0.6, loads_ahead=200, threshold=0.8),
    Case("waste", "unknown", CACHE, wasted_share=0.6, loads_ahead=20),
    Case("latency", "good", CACHE, load_seconds=0.001, layer_seconds=0.001),
    Case("latency", "look", CACHE, "--tune lookahead=5", load_seconds=0.005, layer_seconds=0.001),
    Case("latency", "bad", CACHE, "a `--tier` below int4", load_seconds=0.02, layer_seconds=0.001),
    Case("latency", "bad", CACHE, "--mode expertflow", load_seconds=1, layer_seconds=0.001, horizon=None, mode="lru"),
    Case("latency", "unknown", CACHE, load_seconds=0.02, layer_seconds=0.001, loads=9),
    Case("link", "good", LINK, link_share=0.3),
    Case("link", "good", LINK, link_share=1.3, wait_share=0.01),
    Case("link", "look", LINK, "a `--tier` below int4", link_share=1.3, wait_share=0.1),
    Case("link", "bad", LINK, "a `--tier` below int4", link_share=1.3),
    Case("link", "unknown", LINK, link_share=1.3, loads=9),
    Case("transitions", "good", MOVES, deferred_share=0.2),
    Case("transitions", "look", MOVES, "--tune spare=32", deferred_share=0.7),
    Case("transitions", "bad", MOVES, "--tune spare=32", deferred_share=0.95),
    Case("transitions", "unknown", MOVES, deferred_share=0.95, moves=4),
    Case("waits", "good", MOVES, wait_share=0.0),
    Case("waits", "bad", MOVES, "--mode dynaexq", wait_share=0.5, mode="blocking"),
    Case("waits", "unknown", MOVES, wait_share=0.5, steps=4),
    Case("reclaim", "good", MOVES, reclaiming=3),
    Case("reclaim", "look", MOVES, "--step-tokens", reclaiming=30),
    Case("reclaim", "unknown", MOVES, reclaiming=30, moves=4),
    Case("choice", "good", MOVES, high_traffic=0.5, high_experts=0.2),
    Case("choice", "good", MOVES, high_traffic=1.0, high_experts=1.0),
    Case("choice", "look", MOVES, "--mode uniform", high_traffic=0.25, high_experts=0.2),
    Case("choice", "bad", MOVES, "--mode uniform", high_traffic=0.2, high_experts=0.2),
    Case("choice", "unknown", MOVES, high_traffic=0.2, high_experts=0.2, steps=9),
    Case("failures", "good", CACHE, failed=0),
    Case("failures", "bad", CACHE, "dynaexq inspect STORE --verify", failed=1),
    Case("failures", "bad", MOVES, "dynaexq inspect STORE --verify", failed=1),
    Case("failures", "unknown", CACHE, failed=0, loads=0),
    Case("queue", "good", SERVER, queue_p99=0.1, queue_count=50),
    Case("queue", "look", SERVER, "--slots 8", queue_p99=4.0, queue_count=50),
    Case("queue", "bad", SERVER, "--queue", queue_p99=40.0, queue_count=50, slots=128),
    Case("queue", "unknown", SERVER, queue_p99=40.0, queue_count=5),
    Case("queue", "unknown", SERVER),
    Case("tail", "good", SERVER, tpot_p50=0.01, tpot_p99=0.012, tpot_count=30, step_p50=0.01, step_p99=9.0),
    Case("tail", "look", SERVER, "--step-tokens 64", tpot_p50=0.01, tpot_p99=0.03, tpot_count=30),
    Case("tail", "bad", SERVER, "--step-tokens 64", step_p50=0.01, step_p99=1.0, step_count=200),
    Case("tail", "unknown", SERVER, step_p50=0.01, step_p99=1.0, step_count=50, tpot_p50=0.01, tpot_p99=1.0),
    Case("memory", "good", SERVER, kv_bytes=60 << 20),
    Case("memory", "good", SERVER, kv_bytes=60 << 20, hit_rate=0.95),
    Case("memory", "good", SERVER, kv_bytes=5 << 20, hit_rate=0.3),
    Case("memory", "look", SERVER, "--kv-dtype int8", kv_bytes=60 << 20, hit_rate=0.3),
    Case("memory", "look", SERVER, "--step-tokens 64", activation_bytes=60 << 20, hit_rate=0.3),
    Case("memory", "look", SERVER, "--dense int4", dense_bytes=60 << 20, high_traffic=0.3),
    Case("memory", "bad", CACHE, "--expert-memory 90M", hit_rate=0.3, needs_per_layer=70),
    Case("memory", "unknown", SERVER, steps=3),
    Case("routing", "good", TRACE, entropy=0.99, repeats=0.5, chance=0.1),
    Case("routing", "bad", TRACE, "--mode dynaexq", entropy=0.99, repeats=0.1, chance=0.1),
    Case("routing", "unknown", TRACE, entropy=0.99, repeats=0.1, chance=0.1, tokens=10),
    Case("routing", "unknown", TRACE),
    Case("skew", "good", TRACE, entropy=0.8),
    Case("skew", "look", TRACE, "--mode expertflow", entropy=0.9),
    Case("skew", "bad", TRACE, "--mode expertflow", entropy=0.99),
    Case("skew", "unknown", TRACE, entropy=0.99, tokens=20),
    Case("repetition", "good", TRACE, repeats=0.5, chance=0.1),
    Case("repetition", "look", TRACE, "--predictor pregate", repeats=0.12, chance=0.1),
    Case("repetition", "bad", TRACE, "--predictor pregate", repeats=0.1, chance=0.1),
    Case("repetition", "unknown", TRACE, chance=0.1),
    Case("stability", "good", TRACE, stability=0.9),
    Case("stability", "look", TRACE, "--mode dynaexq", stability=0.5),
    Case("stability", "bad", TRACE, "--mode dynaexq", stability=0.25),
    Case("stability", "unknown", TRACE, stability=0.25, selections=3.0),
    Case("spread", "good", TRACE, spread=0.3, spread_tokens=8),
    Case("spread", "look", TRACE, "--slots 4", spread=0.6, spread_tokens=8),
    Case("spread", "bad", TRACE, "--slots 4", spread=0.9, spread_tokens=8),
    Case("spread", "unknown", TRACE),
]


def judge(case: Case) -> Verdict:
    (check,) = (each for each in CHECKS if each.name == case.check)
    assert check.applies(case.figures)
    return check.judge(case.figures)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check}-{case.status.value}")
def test_a_check(case: Case) -> None:
    found = judge(case)
    assert found.status is case.status and found.text
    assert bool(found.advice) is (case.status in (Status.LOOK, Status.BAD)) is bool(case.advice)
    assert case.advice in found.advice.replace("`", "") or case.advice in found.advice
    for knob in re.findall(r"--tune (\S+=[\d.]+)", found.advice):
        make_tuning(parse_tuning([knob]), "thread" if knob.startswith("spare") else "expertflow")
    if case.status is Status.UNKNOWN:
        assert re.search(r"at least [\d,]+ are needed$", found.text)


def test_every_check_has_cases() -> None:
    for check in CHECKS:
        kinds = {case.status for case in CASES if case.check == check.name}
        assert {Status.GOOD, Status.UNKNOWN} <= kinds and kinds & {Status.LOOK, Status.BAD}, check.name
        assert set(check.figures) <= set(UNITS)


def test_checks_apply_to_whom_they_are_for() -> None:
    names = {kind: {check.name for check in CHECKS if check.applies(found)} for kind, found in {
        "cache": make(capacity=4), "flow": make(capacity=4, horizon=1), "moves": make(moves=0),
        "still": make(mode="static"), "trace": make("trace", None, None),
    }.items()}  # fmt: skip
    everywhere = {"queue", "tail", "memory"}
    assert names["still"] == everywhere and names["trace"] == set(TRACE_CHECKS)
    assert names["cache"] == {*everywhere, "hits", "hidden", "latency", "link", "failures"}
    assert names["flow"] == names["cache"] | {"prediction", "late", "waste"}
    assert names["moves"] == {*everywhere, "transitions", "waits", "reclaim", "choice", "failures"}
    assert set.union(*names.values()) == {check.name for check in CHECKS}


def test_findings_hold_the_figures_that_are_known() -> None:
    found = {finding.name: finding for finding in examine(make(**CACHE, hit_rate=0.9))}
    assert found["hits"].figures == {"hit_rate": 0.9, "capacity": 60, "needs_per_step": 40}
    assert found["prediction"].figures == {"needs": 5000}


def test_the_lowest_tier_goes_no_lower() -> None:
    (finding,) = (each for each in examine(make(tier="int2", **LINK, link_share=2)) if each.name == "link")
    assert finding.advice.startswith("`--expert-memory 90M`")


def test_parts_of_nothing_are_not_known() -> None:
    assert ratio(1, 2) == 0.5 and ratio(1, 0) is ratio(None, 2) is ratio(1, None) is None


def test_everything_that_is_advised_exists() -> None:
    """Options and values named anywhere in the checks, not only in the cases above."""
    sources = Path(dynaexq.doctor.__file__).parent.glob("*_checks.py")
    advice = Path(dynaexq.doctor.__file__).with_name("advice.py").read_text("utf-8")
    text = "\n".join([advice, *(path.read_text("utf-8") for path in sources)])
    shown = {}
    for command in ("serve", "generate", "inspect", "predictor train"):
        result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0
        shown[command] = set(re.findall(r"--[a-z][a-z-]+", result.output))
    options = set(re.findall(r"--[a-z][a-z-]+", text))
    assert {"--tune", "--slots", "--queue", "--step-tokens", "--expert-memory", "--kv-dtype"} <= options
    assert options - {"--verify", "--traces"} <= shown["serve"]
    assert "--verify" in shown["inspect"] and "--traces" in shown["predictor train"]
    assert set(re.findall(r"--tune (\w+)=", text)) == {
        "lookahead", "threshold", "in_flight", "standing_share", "spare",
    } <= set(KNOBS)  # fmt: skip
    assert set(re.findall(r"--mode ([a-z-]+)", text)) <= set(MODES)
    assert set(re.findall(r"dynaexq ([a-z]+)", text)) - {"import"} <= {"predictor", "inspect"}
