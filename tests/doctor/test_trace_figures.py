"""What traces that are made up say in figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynaexq.doctor import Status, examine
from dynaexq.doctor.trace_figures import measure_figures
from dynaexq.traffic.trace import TraceHead, TraceReader
from dynaexq.traffic.trace_edit import write_trace
from dynaexq.traffic.trace_synthetic import SyntheticTraffic, draw_trace

HEAD = TraceHead(model="m", layers=2, experts=32, top_k=4, source="synthetic")


def judge(path: Path, **traffic: Any) -> dict[str, Status]:
    options: dict[str, Any] = {"tokens": 8000, "answer": 100, "zipf": 1.0, **traffic}
    write_trace(path, HEAD, draw_trace(HEAD, SyntheticTraffic(**options)), False)
    figures = measure_figures(TraceReader.open(path))
    assert figures.tokens == options["tokens"] and figures.subject.kind == "trace"
    assert figures.selections == pytest.approx(options["tokens"] * 4 / 32 / 2, rel=0.01)
    return {finding.name: finding.status for finding in examine(figures)}


def test_a_skewed_workload_that_stays(tmp_path: Path) -> None:
    found = judge(tmp_path / "a.parquet", zipf=1.5, repeat=0.8)
    assert found["routing"] is found["repetition"] is found["stability"] is Status.GOOD
    assert found["skew"] in (Status.GOOD, Status.LOOK)


def test_even_routing_is_erratic(tmp_path: Path) -> None:
    found = judge(tmp_path / "a.parquet", zipf=0.0)
    assert found["routing"] is found["skew"] is found["repetition"] is Status.BAD
    assert found["stability"] in (Status.LOOK, Status.BAD)


def test_a_shift_halfway(tmp_path: Path) -> None:
    assert judge(tmp_path / "a.parquet", shift_every=4000)["stability"] in (Status.LOOK, Status.BAD)


def test_few_tokens_say_nothing(tmp_path: Path) -> None:
    assert set(judge(tmp_path / "a.parquet", tokens=100).values()) == {Status.UNKNOWN}
