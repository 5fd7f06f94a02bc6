"""The commands as processes: the memory limit is real, Ctrl-C is clean, stdout is only the result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from typer.testing import CliRunner

from dynaexq.cli.app import app
from dynaexq.launch import EMBEDDED_MODEL
from support.processes import start_command

STATIC = ("--mode", "static", "--tier", "int2", "--json", "-")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dynaexq", *arguments], capture_output=True, text=True, check=False)


def test_the_memory_limit_holds_and_its_floor_works() -> None:
    refused = run("generate", "--demo", "--prompt", "copy: a b", "--memory", "200M", *STATIC)
    assert refused.returncode == 6
    assert refused.stdout == ""
    found = re.search(r"below the floor .*?\((\d+) bytes", refused.stderr.replace("\n", " "))
    assert found is not None
    limit = int(found[1])
    ran = run("generate", "--demo", "--prompt", "copy: a b", "--memory", str(limit), *STATIC)
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    assert result["text"].startswith("a b")
    assert result["rss_peak_bytes"] <= limit == result["budget_bytes"]
    assert result["device_bytes_peak"] <= limit


def test_interrupting_a_preparation_keeps_what_was_done(tmp_path: Path) -> None:
    target, output = tmp_path / "store", tmp_path / "output"
    arguments = ("prepare", str(EMBEDDED_MODEL), "-o", str(target), "--tiers", "int2,int4", "--quantizer", "rtn")
    child = start_command(output, *arguments)
    while not list(target.glob("experts/layer-0001*.safetensors")):
        assert child.is_alive(), output.read_text()
        time.sleep(0.01)
    os.kill(child.ident or 0, signal.SIGINT)
    child.join()
    assert child.exitcode == 130
    assert "interrupted" in output.read_text()
    assert "Traceback" not in output.read_text()
    assert not list(target.rglob("*.partial"))
    kept = {path: path.stat().st_mtime_ns for path in target.rglob("layer-0000*")}
    assert len(kept) == 2
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in target.rglob("layer-0000*")} == kept


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    child = start_command(tmp_path / "output", "inspect", "--help", reader=False)
    child.join()
    assert child.exitcode == 1  # as `| head` leaves it
    assert (tmp_path / "output").read_text() == ""
