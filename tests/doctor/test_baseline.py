"""Baselines: kept whole, read back, compared, and refused where they are none or of something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from doctor.test_checks import CACHE, make
from dynaexq.core import OptionError, SideFileError
from dynaexq.doctor import Baseline, Change, Status, Subject, examine


def keep(path: Path, **values: Any) -> Baseline:
    figures = make(**{**CACHE, **values})
    baseline = Baseline.of(figures, examine(figures), "a test")
    baseline.save(path)
    return baseline


def test_what_is_kept_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    kept = keep(path, hit_rate=0.9)
    assert Baseline.load(path) == kept and kept.checks["hits"] is Status.GOOD
    assert [each.name for each in tmp_path.iterdir()] == ["b.json"]
    again = keep(path, hit_rate=0.4)  # an earlier baseline may be replaced
    assert Baseline.load(path) == again != kept


def test_figures_then_and_now(tmp_path: Path) -> None:
    before = keep(tmp_path / "b.json", hit_rate=0.9, late_share=0.2, hidden=0.9)
    now = make(**{**CACHE, "hit_rate": 0.4, "late_share": 0.1, "loads": 3, "hidden": 0.1})
    changes = {change.name: change for change in before.compare(now)}
    assert changes["hit_rate"] == Change("hit_rate", 0.9, 0.4) and changes["capacity"] == Change("capacity", 60, 60)
    assert before.worse(examine(now)) == ["hits"]  # `late` is better, `hidden` is not known any more
    bare = {change.name: change for change in before.compare(make())}
    assert bare["hit_rate"] == Change("hit_rate", 0.9, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is no baseline; --save-baseline FILE makes one"),
        (b"{}", "is no baseline"),
        (b'{"dynaexq_baseline": 1', "is damaged"),
        (b'{"dynaexq_baseline": 1}', "is damaged at taken: Field required; take a new baseline"),
        (b'{"dynaexq_baseline"' + b"[" * 100_000, "is damaged"),
        (b'{"dynaexq_baseline": 1, "\xff"}', "is damaged"),
        (b'{"dynaexq_baseline"' + b" " * (1 << 20), "is no baseline"),
    ],
)
def test_what_is_no_baseline_is_refused(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "b.json"
    path.write_bytes(text)
    with pytest.raises(SideFileError, match=str(path)) as caught:
        Baseline.load(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dynaexq_baseline": 2}, "is a baseline of version 2, this program reads 1"),
        ({"figures": {"hits": 1}}, "it has a figure 'hits' that is not known"),
        ({"figures": {"hit_rate": "x"}}, "damaged at figures.hit_rate"),
        ({"figures": {"hit_rate": float("nan")}}, "damaged at figures.hit_rate"),
        ({"checks": {"hits": "great"}}, "damaged at checks.hits"),
        ({"extra": 1}, "damaged at extra"),
    ],
)
def test_damaged_values_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "b.json"
    keep(path, hit_rate=0.9)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(SideFileError, match="b.json") as caught:
        Baseline.load(path)
    assert words in str(caught.value)


def test_a_missing_baseline_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not there"):
        Baseline.load(tmp_path / "b.json")
    with pytest.raises(OptionError, match="no regular file"):
        Baseline.load(tmp_path)


@pytest.mark.parametrize("change", [{"model": "other"}, {"layers": 7}, {"experts": 8}, {"kind": "trace"}])
def test_baselines_of_something_else_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    before = keep(tmp_path / "b.json")
    before.check_subject(make(mode="lru", tier="int2").subject, tmp_path / "b.json")  # other options of the same model
    with pytest.raises(SideFileError, match="b.json is a baseline of"):
        before.check_subject(Subject(**{**before.subject.model_dump(), **change}), tmp_path / "b.json")


def test_nothing_else_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    with pytest.raises(OptionError, match=r"notes.json: it is there, and was never a baseline; name another file"):
        keep(path)
    assert path.read_text() == '{"mine": 1}'
