"""Fixtures shared by all tests. Checkpoints are real files; nothing needs the network."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait by spinning stall everything beside them

import torch
from hypothesis import settings

from dynaexq.integrations.transformers.loading import open_experts
from dynaexq.launch import EMBEDDED_MODEL
from dynaexq.store import PrepareOptions, prepare_store
from support.files import silent
from support.sources import RandomSource
from support.tiny_models import write_checkpoint

torch.set_num_threads(2)
settings.register_profile("dynaexq", deadline=None)
settings.load_profile("dynaexq")


@pytest.fixture(scope="session")
def checkpoint_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE checkpoint in three shards. Copy it before changing it."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), shards=3)


@pytest.fixture(scope="session")
def embedded_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model at four tiers. Copy it before changing it."""
    root = tmp_path_factory.mktemp("embedded") / "store"
    prepare_store(
        open_experts(EMBEDDED_MODEL)[1], root, PrepareOptions(("int2", "int4", "int8", "bf16"), 64, "rtn"), silent
    )
    return root


@pytest.fixture
def random_source(tmp_path: Path) -> RandomSource:
    """An expert source of random weights over a real file."""
    return RandomSource.create(tmp_path / "source")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("DYNAEXQ_CACHE", str(tmp_path / "cache"))
