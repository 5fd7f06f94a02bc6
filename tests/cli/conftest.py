"""Fixtures of the tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynaexq.cli.app import app
from dynaexq.launch import EMBEDDED_MODEL


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model at int2 and bf16. Copy it before changing it."""
    root = tmp_path_factory.mktemp("cli") / "store"
    options = ("-o", str(root), "--tiers", "int2,bf16", "--quantizer", "rtn")
    assert CliRunner().invoke(app, ["prepare", str(EMBEDDED_MODEL), *options]).exit_code == 0
    return root


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the embedded model."""
    path = tmp_path_factory.mktemp("recorded") / "run.parquet"
    options = ("--prompt", "reverse: a b c d", "--max-new-tokens", "24", "--record", str(path))
    assert CliRunner().invoke(app, ["generate", "--demo", *options]).exit_code == 0
    return path
