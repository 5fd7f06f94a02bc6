"""Benchmarks are commands nobody runs every day: they must at least still find what they measure."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"__init__", "peers_llama"}
"""The second runs in an environment of its own."""

NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in ELSEWHERE)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_imports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.endswith("_plot"):
        pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT))
    assert importlib.import_module(f"benchmarks.{name}").__doc__
