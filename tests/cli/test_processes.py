"""The commands as processes: the memory limit is real, Ctrl-C is clean, stdout is only the result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynaexq.launch import EMBEDDED_MODEL

STATIC = ("--mode", "static", "--tier", "int2", "--json", "-")
COMMAND = [sys.executable, "-m", "dynaexq"]


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "DYNAEXQ_CACHE": str(cache)}
    return subprocess.run([*COMMAND, *arguments], env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_the_memory_limit_holds_and_its_floor_works(cache: Path) -> None:
    refused = run(cache, "generate", "--demo", "--prompt", "copy: a b", "--memory", "200M", *STATIC)
    assert refused.returncode == 6
    assert refused.stdout == ""
    found = re.search(r"below the floor .*?\((\d+) bytes", refused.stderr.replace("\n", " "))
    assert found is not None
    limit = int(found[1])
    ran = run(cache, "generate", "--demo", "--prompt", "copy: a b", "--memory", str(limit), *STATIC)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["text"].startswith("a b")
    assert result["rss_peak_bytes"] <= limit == result["budget_bytes"]
    assert result["device_bytes_peak"] <= limit


def test_interrupting_a_preparation_keeps_what_was_done(tmp_path: Path) -> None:
    target = tmp_path / "store"
    arguments = ["prepare", str(EMBEDDED_MODEL), "-o", str(target), "--tiers", "int2,int4"]
    # a suite started in the background of a shell ignores SIGINT, and so would its children
    command = ["env", "--default-signal=INT", *COMMAND, *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(target.glob("experts/layer-0001*.safetensors")):
        assert child.poll() is None, child.communicate()
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate()
    assert child.returncode == 130
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not list(target.rglob("*.partial"))
    kept = {path: path.stat().st_mtime_ns for path in target.rglob("layer-0000*")}
    assert len(kept) == 2
    assert run(tmp_path, *arguments).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in target.rglob("layer-0000*")} == kept


def test_a_reader_that_leaves_early_is_no_error(cache: Path) -> None:
    env = {**os.environ, "DYNAEXQ_CACHE": str(cache)}
    pipeline = f"{sys.executable} -m dynaexq inspect --help | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipeline], env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
