from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynaexq.core import OptionError
from dynaexq.evaluate import Windows, cut_windows, measure_perplexity, read_documents


@given(st.integers(2, 200), st.integers(2, 40), st.data())
def test_every_token_is_scored_once_with_enough_before_it(length: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window - 1))
    limit = data.draw(st.none() | st.integers(1, 250))
    windows = cut_windows(torch.arange(length), window, stride, limit)
    scored = [int(token) for each in windows for token in each.ids[0, -each.scored :]]
    assert scored == list(range(1, min(length, (limit or length) + 1)))
    for each in windows:
        assert each.scored < each.ids.shape[1] <= window
        context = each.ids.shape[1] - each.scored
        assert context >= window - stride or each.ids[0, 0] == 0


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (8, 8), (8, 0)])
def test_unfit_windows(window: int, stride: int) -> None:
    with pytest.raises(OptionError, match="smaller stride"):
        cut_windows(torch.arange(20), window, stride)


def test_perplexity_of_a_known_distribution() -> None:
    def score(window: Windows) -> list[float]:
        targets = window.ids[0, -window.scored :].tolist()
        return [math.log(0.6 if target == 0 else 0.1) for target in targets]

    ids = torch.tensor([3, 0, 0, 1, 0, 2, 0])
    result = measure_perplexity(score, cut_windows(ids, 4, 2), lambda *_: None)
    assert result.tokens == 6
    assert result.perplexity == pytest.approx(math.exp(-(4 * math.log(0.6) + 2 * math.log(0.1)) / 6))


def test_documents_of_known_forms(tmp_path: Path) -> None:
    lines = '{"question": "q", "answer": "a"}\n\n{"prompt": "def f():", "canonical_solution": " pass"}\n{"text": "t"}\n'
    (tmp_path / "x.jsonl").write_text(lines)
    assert read_documents(tmp_path / "x.jsonl") == ["q\na", "def f(): pass", "t"]
    (tmp_path / "x.txt").write_text("a\n\nb")
    assert read_documents(tmp_path / "x.txt") == ["a\n\nb"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.jsonl", b'{"q": 1}', "line 1: no text; known fields are text or question"),
        ("x.jsonl", b'{"text": "a"}\n{', "line 2: not valid JSON"),
        ("x.txt", b" \n", "is empty"),
        ("x.txt", b"ab\xff", r"not UTF-8 text \(byte 2\)"),
    ],
)
def test_unfit_texts(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(OptionError, match=words):
        read_documents(tmp_path / name)
    with pytest.raises(OptionError, match="cannot read"):
        read_documents(tmp_path / "nowhere.txt")
