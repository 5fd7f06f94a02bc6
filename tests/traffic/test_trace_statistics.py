"""Statistics of traces whose answers are known, and traffic that is made up to have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dynaexq.core import OptionError
from dynaexq.traffic.trace import TraceHead, TraceReader, join_rows
from dynaexq.traffic.trace_edit import write_trace
from dynaexq.traffic.trace_plot import plot_traces
from dynaexq.traffic.trace_statistics import (
    activation,
    chance_of_repeats,
    concentration,
    entropy,
    hot_set,
    measure_trace,
    overlap,
    repeats,
)
from dynaexq.traffic.trace_synthetic import SyntheticTraffic, draw_trace

HEAD = TraceHead(layers=4, experts=16, top_k=2)


def test_by_hand() -> None:
    traffic = np.array([[40.0, 30, 20, 10], [25, 25, 25, 25]])
    assert concentration(traffic, 0.5) == pytest.approx((0.7 + 0.5) / 2)
    assert entropy(traffic[1:]) == pytest.approx(1) and entropy(np.array([[1.0, 0, 0, 0]])) == 0
    assert chance_of_repeats(traffic[1:], 1) == pytest.approx(0.25)
    assert hot_set(traffic, 0.5).tolist() == [[True, True, False, False], [True, True, False, False]]
    assert overlap(traffic, traffic[:, ::-1], 0.5) == pytest.approx(0.5)
    ids = np.array([[[0, 1]], [[1, 2]], [[0, 1]]], np.uint16)
    assert repeats(ids, 1) == pytest.approx(0.5) and repeats(ids, 2) == 1
    assert activation(ids, 4) == 0.75 and activation(ids[:1], 4) == 0.5


def measure(traffic: SyntheticTraffic) -> object:
    rows = list(draw_trace(HEAD, traffic))
    return measure_trace(HEAD, [join_rows(rows)], sum(len(each.window) for each in rows))


def test_synthetic_traffic_is_what_was_asked_for() -> None:
    even, skewed = measure(SyntheticTraffic(4000, zipf=0)), measure(SyntheticTraffic(4000, zipf=1.2))
    assert even.entropy > 0.99 and skewed.entropy < 0.9 and skewed.concentration[0.1] > 0.3 > even.concentration[0.1]
    assert even.tokens == 4000 and even.windows == 4000 and even.prompt_tokens == 0
    loose, tied = (measure(SyntheticTraffic(4000, zipf=0, repeat=repeat)) for repeat in (0.0, 0.8))
    assert loose.repeats[1] == pytest.approx(loose.chance, abs=0.03) and tied.repeats[1] > 0.75 > tied.repeats[4] > 0.4
    served = measure(SyntheticTraffic(4000, batch=8, prompt=100, answer=50))
    assert served.prompt_tokens >= 1000 and served.requests >= 10 and set(served.prefill) >= {16, 512}
    assert served.decode[1] == pytest.approx(2 / 16) and served.decode[32] > served.decode[8] > served.decode[2]


def test_shifts_deal_popularity_anew() -> None:
    rows = join_rows(list(draw_trace(HEAD, SyntheticTraffic(6000, zipf=1.5, shift_every=3000))))
    halves = [measure_trace(HEAD, [rows.cut(part)], 3000) for part in (slice(0, 3000), slice(3000, None))]
    kept = measure_trace(HEAD, [rows.cut(slice(0, 1500))], 1500)
    assert overlap(halves[0].traffic, halves[1].traffic, 0.25) < 0.6 < overlap(halves[0].traffic, kept.traffic, 0.25)


def test_the_same_seed_gives_the_same_trace() -> None:
    one, same, other = (
        join_rows(list(draw_trace(HEAD, SyntheticTraffic(500, burst=0.3, repeat=0.2, batch=4, prompt=20, seed=seed))))
        for seed in (1, 1, 2)
    )
    assert np.array_equal(one.ids, same.ids) and not np.array_equal(one.ids, other.ids)
    for bad in ({"zipf": -1}, {"burst": 2}, {"repeat": float("nan")}, {"tokens": 0}, {"prompt": -1}):
        with pytest.raises(OptionError):
            SyntheticTraffic(**{"tokens": 10, **bad}).check()  # type: ignore[arg-type]


def test_ids_of_a_token_differ(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.parquet", HEAD, draw_trace(HEAD, SyntheticTraffic(300, batch=3)), weights=False)
    (rows,) = TraceReader.open(tmp_path / "t.parquet").batches()
    assert (rows.ids[..., 0] != rows.ids[..., 1]).all() and rows.ids.max() < 16


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    traces = {name: measure(SyntheticTraffic(600, seed=seed)) for seed, name in enumerate(("text", "code"))}
    plot_traces(traces, tmp_path / "t.svg")
    plot_traces({"text": traces["text"]}, tmp_path / "t.png")
    assert b"heavy tail" in (tmp_path / "t.svg").read_bytes() or (tmp_path / "t.svg").stat().st_size > 10_000
    with pytest.raises(OptionError, match="--output"):
        plot_traces(traces, tmp_path / "no" / "t.png")
