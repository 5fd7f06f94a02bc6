"""Traces on disk: what is written is read, whole or not at all, and nothing else is taken for one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaexq.core import ExpertShape, ModelShape, OptionError, SideFileError
from dynaexq.traffic.trace import HEAD_KEY, TraceHead, TraceReader, TraceRows, join_rows, make_schema
from dynaexq.traffic.trace_edit import Part, merge_traces, parse_span, slice_trace, write_trace
from dynaexq.traffic.trace_writer import TraceWriter, check_trace_target

HEAD = TraceHead(model="test", fingerprint="f", layers=3, experts=8, top_k=2, hidden=64, intermediate=32)


def make_rows(count: int, seed: int = 0, first_window: int = 0) -> TraceRows:
    random = np.random.default_rng(seed)
    window = first_window + np.sort(random.integers(0, 5, count)).astype(np.int32)
    return TraceRows(
        window,
        window * 0.5,
        random.random(count).astype(np.float32),
        random.random(count) < 0.5,
        random.integers(-1, 4, count).astype(np.int32),
        random.integers(0, 1 << 40, count),
        random.integers(0, HEAD.experts, (count, 3, 2)).astype(np.uint16),
        random.random((count, 3, 2)).astype(np.float32),
    )


def write(path: Path, rows: list[TraceRows], weights: bool = True, head: TraceHead = HEAD) -> Path:
    write_trace(path, head, iter(rows), weights)
    return path


def read(path: Path) -> TraceRows:
    reader = TraceReader.open(path)
    rows = join_rows(list(reader.batches(weights=True)))
    assert reader.tokens == len(rows.window)
    reader.close()
    return rows


def same(one: TraceRows, other: TraceRows) -> bool:
    return all(a is b is None or np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@given(sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=4), weights=st.booleans(), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], weights: bool, seed: int
) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.parquet"
    parts = [make_rows(size, seed, 5 * place) for place, size in enumerate(sizes)]
    whole = join_rows(parts)
    assert same(read(write(path, parts, weights)), whole if weights else whole._replace(weights=None))
    assert TraceReader.open(path).head == HEAD and TraceReader.open(path).has_weights is weights


def test_a_trace_that_is_cut_off_is_none(tmp_path: Path) -> None:
    whole = write(tmp_path / "trace.parquet", [make_rows(500)]).read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        (tmp_path / "cut.parquet").write_bytes(whole[:length])
        with pytest.raises(SideFileError, match=r"cut\.parquet is no whole Parquet file"):
            TraceReader.open(tmp_path / "cut.parquet")


def test_damage_inside_is_found(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.parquet", [make_rows(4000)])
    whole = bytearray(path.read_bytes())
    whole[2000:2400] = bytes(400)
    path.write_bytes(whole)
    with pytest.raises(SideFileError, match="damaged"):
        read(path)


def test_other_files_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(SideFileError, match="not there"):
        TraceReader.open(tmp_path / "nowhere.parquet")
    with pytest.raises(SideFileError, match="no regular file"):
        TraceReader.open(tmp_path)
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"window": [1]}), foreign)
    with pytest.raises(SideFileError, match="does not say of what"):
        TraceReader.open(foreign)
    pq.write_table(pa.table({"window": [1]}).replace_schema_metadata(make_schema(HEAD, False).metadata), foreign)
    with pytest.raises(SideFileError, match="its columns are window"):
        TraceReader.open(foreign)
    for head in (
        b"{}",
        b'{"trace":9,"layers":3,"experts":8,"top_k":2}',
        b'{"layers":999999,"experts":60000,"top_k":2}',
    ):
        pq.write_table(pa.table({"window": [1]}).replace_schema_metadata({HEAD_KEY: head}), foreign)
        with pytest.raises(SideFileError, match="no trace that can be read"):
            TraceReader.open(foreign)


@pytest.mark.parametrize("name", ["started", "ids"])
def test_missing_values_are_damage(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "t.parquet", [make_rows(4)])
    table = pq.read_table(path)
    place = table.schema.get_field_index(name)
    values = table.column(name).to_pylist()
    values[1] = None if name == "started" else [None, *values[1][1:]]
    column = pa.array(values, table.schema.field(name).type)
    pq.write_table(table.set_column(place, table.schema.field(name), column), path)
    with pytest.raises(SideFileError, match=f"damaged: values of {name} are missing"):
        read(path)


def test_experts_that_are_not_there_and_passes_out_of_order_are_errors(tmp_path: Path) -> None:
    rows = make_rows(50)
    rows.ids[7, 1, 0] = 8
    with pytest.raises(SideFileError, match="expert 8, where layers have 8"):
        read(write(tmp_path / "a.parquet", [rows]))
    with pytest.raises(SideFileError, match="out of order"):
        read(write(tmp_path / "b.parquet", [make_rows(50, 0, 9), make_rows(50)]))


def test_a_trace_of_another_model_is_refused(tmp_path: Path) -> None:
    reader = TraceReader.open(write(tmp_path / "trace.parquet", [make_rows(5)]))
    shape = ModelShape(3, 8, ExpertShape(64, 32))
    reader.check_model("f", shape)
    for fingerprint, other in (("g", shape), ("f", ModelShape(3, 9, ExpertShape(64, 32)))):
        with pytest.raises(SideFileError, match="of another model: test, 3 layers of 8 experts"):
            reader.check_model(fingerprint, other)


def test_an_earlier_trace_stays_until_the_next_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.parquet", [make_rows(20)])
    before = path.read_bytes()
    writer = TraceWriter(path, HEAD, weights=True)
    writer.add(make_rows(20_000, 1))
    assert path.read_bytes() == before
    writer.abandon()
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["trace.parquet"]


def test_traces_go_only_where_they_belong(tmp_path: Path) -> None:
    check_trace_target(tmp_path / "new.parquet", "--record")
    (tmp_path / "notes.parquet").write_text("mine")
    pq.write_table(pa.table({"prices": [1]}), tmp_path / "prices.parquet")
    check_trace_target(write(tmp_path / "old.parquet", [make_rows(3)]), "--record")
    (tmp_path / "empty.parquet").touch()
    check_trace_target(tmp_path / "empty.parquet", "--record")
    for name, words in (
        ("notes.parquet", "never a trace"),
        ("prices.parquet", "does not say of what.*it is not overwritten"),
        ("run.txt", r"ends in \.parquet"),
        ("no/x.parquet", "directory"),
    ):
        with pytest.raises(OptionError, match=words):
            check_trace_target(tmp_path / name, "--record")


def test_parts_are_cut_out(tmp_path: Path) -> None:
    rows = join_rows([make_rows(300, 0), make_rows(300, 1, 5)])
    source, target = write(tmp_path / "trace.parquet", [rows]), tmp_path / "part.parquet"
    cases = [
        (Part(windows=(2, 7)), (rows.window >= 2) & (rows.window < 7)),
        (Part(requests=(1, 3), prefill=True), (rows.request >= 1) & (rows.request < 3) & rows.prefill),
        (Part(prefill=False, tokens=40), ~rows.prefill & (np.cumsum(~rows.prefill) <= 40)),
    ]
    for part, mask in cases:
        assert slice_trace(source, part, target) == mask.sum() and same(read(target), rows.cut(mask))
    with pytest.raises(OptionError, match="nothing is left"):
        slice_trace(source, Part(windows=(90, 91)), tmp_path / "none.parquet")
    assert not (tmp_path / "none.parquet").exists()
    assert parse_span(":3", "--windows") == (0, 3) and parse_span(None, "--windows") is None
    for text in ("3", "3:3", "-1:2", "a:b"):
        with pytest.raises(OptionError, match="FROM:BEFORE"):
            parse_span(text, "--windows")


def test_traces_in_a_row_go_on_from_each_other(tmp_path: Path) -> None:
    first, second = make_rows(30), make_rows(40, 1)
    paths = [write(tmp_path / f"{place}.parquet", [rows]) for place, rows in enumerate((first, second))]
    assert merge_traces(paths, tmp_path / "all.parquet") == 70
    rows = read(tmp_path / "all.parquet")
    assert (np.diff(rows.window) >= 0).all() and np.array_equal(rows.ids, join_rows([first, second]).ids)
    assert set(rows.request[:30]).isdisjoint(set(rows.request[30:]) - {-1})
    assert rows.started[30:].min() >= (first.started + first.seconds).max() - 1e-6
    other = write(tmp_path / "other.parquet", [make_rows(5)], head=HEAD.model_copy(update={"fingerprint": "g"}))
    with pytest.raises(SideFileError, match="of another model than"):
        merge_traces([paths[0], other], tmp_path / "none.parquet")
