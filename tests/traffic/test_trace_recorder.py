"""Runs that are recorded: every choice of every router, whose token it was, and nobody waits for it."""

from __future__ import annotations

import errno
import shutil
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

from dynaexq.core import ExpertShape, ModelShape, OptionError, SideFileError
from dynaexq.formats import VersionLayout, tier_format
from dynaexq.llm import LLM
from dynaexq.traffic import RoutedLayer, TrafficMeter, trace_recorder, trace_writer
from dynaexq.traffic.recorder import ClosedWindow, TokenRun
from dynaexq.traffic.trace import TraceReader, TraceRows, join_rows
from dynaexq.traffic.trace_recorder import TraceRecorder
from dynaexq.traffic.trace_writer import TraceWriter

MIB = 1 << 20


class FewExperts:
    def __init__(self) -> None:
        self.shape = ModelShape(2, 8, ExpertShape(64, 32))
        self.formats = [tier_format("int4", 32), tier_format("int2", 32)]
        self.layouts = [VersionLayout.of(fmt, self.shape.expert) for fmt in self.formats]


def make_window(tokens: int, seed: int = 0, forwards: int = 1, **more: Any) -> ClosedWindow:
    random = np.random.default_rng(seed)
    layers = [
        RoutedLayer(layer, torch.from_numpy(random.integers(0, 8, (tokens, 2))), torch.full((tokens, 2), 0.5))
        for _ in range(forwards)
        for layer in range(2)
    ]
    return ClosedWindow(layers, False, random.integers(0, 2, 16), 0.25, opened=100.0 + seed, **more)


def read(path: Path) -> TraceRows:
    return join_rows(list(TraceReader.open(path).batches(weights=True)))


def test_windows_become_rows(tmp_path: Path) -> None:
    runs = [TokenRun(7, 1, False), TokenRun(9, 3, True)]
    windows = [
        make_window(2, 0),
        make_window(2, 1),
        make_window(4, 2, runs=runs),
        make_window(4, 3, runs=runs[:1]),  # does not add up, so it says nothing
        make_window(2, 4, forwards=2),
    ]
    recorder = TraceRecorder(tmp_path / "t.parquet", "few", "f", FewExperts())
    for window in windows:
        recorder.after_window(window)
    recorder.close()
    recorder.close()
    rows = read(tmp_path / "t.parquet")
    assert rows.window.tolist() == [0, 0, 1, 1, *[2] * 4, *[3] * 4, *[4] * 4]
    assert rows.request.tolist() == [-1] * 4 + [7, 9, 9, 9] + [-1] * 8
    assert rows.prefill.tolist() == [False] * 5 + [True] * 3 + [False] * 8
    assert rows.started[-1] == 4.0 and rows.seconds[0] == 0.25 and (rows.weights == 0.5).all()
    first, last = windows[0].layers, windows[4].layers
    assert np.array_equal(rows.ids[:2], torch.stack([each.ids for each in first], 1).numpy())
    halves = [torch.stack([each.ids for each in part], 1) for part in (last[:2], last[2:])]
    assert np.array_equal(rows.ids[-4:], torch.cat(halves).numpy())
    distinct = {(layer, int(each)) for layer, routed in enumerate(first) for each in routed.ids.ravel()}
    sizes = [layout.extent_bytes for layout in FewExperts().layouts]
    assert rows.expert_bytes[0] == sum(sizes[windows[0].levels[8 * layer + each]] for layer, each in distinct)


def test_a_recorded_run_has_every_choice_and_whose_it_was(embedded_store: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    with LLM(str(embedded_store), slots=2, context=256, mode="static", tier="int4", trace=path) as llm:
        meter = TrafficMeter(llm.launch.runtime.experts.shape)
        llm.launch.runtime.listener = meter
        prompts = [llm.encoder.encode(text) for text in ("reverse: a b c", "sort: d e f g")]
        streams = [llm.submit(prompt, 12) for prompt in prompts]
        answers = [stream.wait() for stream in streams]
    rows = read(path)
    places = (rows.ids.astype(np.int64) + 32 * np.arange(6)[:, None]).ravel()
    assert np.array_equal(np.bincount(places, minlength=192).reshape(6, 32), meter.sums)
    for request, prompt, answer in zip(np.unique(rows.request), prompts, answers, strict=True):
        own = rows.request == request
        assert rows.prefill[own].sum() == len(prompt) and (~rows.prefill[own]).sum() == len(answer.tokens) - 1
    assert (rows.seconds > 0).all() and (rows.expert_bytes > 0).all() and TraceReader.open(path).head.top_k == 4
    assert llm.launch.plan.fixed["trace"] > 0


def test_steps_that_are_one_native_call_are_recorded_where_nobody_else_listens(
    embedded_store: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.parquet"
    with LLM(str(embedded_store), slots=1, context=128, mode="static", tier="int4", trace=path) as llm:
        assert llm.launch.runtime.fused_layers == 6 and llm.launch.runtime.listener is None
        answer = llm.generate("reverse: a b c", max_tokens=8)
    rows = read(path)
    assert (~rows.prefill).sum() == len(answer.tokens) - (answer.finish.reason.value == "length") > 1
    assert set(rows.request) != {-1}


def test_runs_whose_versions_move_are_recorded_too(embedded_store: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    with LLM(str(embedded_store), slots=1, context=128, mode="dynaexq", expert_memory="12M", trace=path) as llm:
        llm.generate("reverse: a b c", max_tokens=3)
    assert len(read(path).window) > 5
    with pytest.raises(OptionError, match=r"--record .*ends in \.parquet"):
        LLM(str(embedded_store), mode="static", tier="int4", trace=tmp_path / "run.json")


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SideFileError("the disk is full")

    monkeypatch.setattr(TraceWriter, "add", fail)
    recorder = TraceRecorder(tmp_path / "t.parquet", "few", "", FewExperts())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder.after_window(make_window(2))
        recorder.close()
    assert [str(each.message) for each in caught] == [recorder.problem] and "the disk is full" in (
        recorder.problem or ""
    )


def record(path: Path, *windows: ClosedWindow) -> str | None:
    """Record windows; the problem there was."""
    recorder = TraceRecorder(path, "few", "", FewExperts())
    for window in windows:
        recorder.after_window(window)
    recorder.close()
    return recorder.problem


def test_a_forward_pass_that_failed_is_left_out(tmp_path: Path) -> None:
    whole, cut = make_window(2, 0), make_window(2, 1)
    del cut.layers[1:]
    assert record(tmp_path / "t.parquet", cut, whole, cut, make_window(2, 2)) is None
    assert read(tmp_path / "t.parquet").window.tolist() == [0, 0, 1, 1]


@pytest.mark.filterwarnings("ignore:the trace")
def test_whatever_goes_wrong_is_said(tmp_path: Path) -> None:
    uneven = make_window(2, 1)
    uneven.layers[1] = uneven.layers[1]._replace(ids=torch.zeros(3, 2, dtype=torch.int64))
    problem = record(tmp_path / "t.parquet", make_window(2, 0), uneven)
    assert problem is not None and "ends here" in problem


@pytest.mark.filterwarnings("ignore:the trace")
def test_what_was_written_is_kept_where_the_disk_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_writer, "ROW_GROUP", 2)
    free = iter([1 << 40, 1 << 20])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
    problem = record(tmp_path / "t.parquet", make_window(2, 0), make_window(3, 1))
    assert "1 MiB are free" in str(problem) and read(tmp_path / "t.parquet").window.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:the trace")
def test_nothing_is_left_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trace_writer, "ROW_GROUP", 2)
    monkeypatch.setattr(pyarrow.parquet.ParquetWriter, "write_table", fail)
    problem = record(tmp_path / "t.parquet", make_window(2, 0), make_window(3, 1))
    assert "No space left" in str(problem) and list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_in_time_ends_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, held, add = threading.Event(), threading.Event(), TraceWriter.add

    def wait(writer: TraceWriter, rows: TraceRows) -> None:
        begun.set()
        held.wait(30)
        add(writer, rows)

    monkeypatch.setattr(TraceWriter, "add", wait)
    monkeypatch.setattr(trace_recorder, "MAX_WAITING_BYTES", 100_000)
    recorder = TraceRecorder(tmp_path / "t.parquet", "few", "", FewExperts())
    recorder.after_window(make_window(64, 0))
    assert begun.wait(30)
    with pytest.warns(UserWarning, match="cannot be written as fast as it comes"):
        for seed in range(1, 200):
            recorder.after_window(make_window(64, seed))
    held.set()
    recorder.close()
    assert 0 < len(read(tmp_path / "t.parquet").window) < 200 * 64
