"""What every result records: machine, versions, commit, command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

THREADS = 2


def pin_threads() -> None:
    """Two threads on two cores, so that results of different machines compare."""
    torch.set_num_threads(THREADS)
    cores = sorted(os.sched_getaffinity(0))[:THREADS]
    os.sched_setaffinity(0, cores)


def describe_run() -> dict[str, Any]:
    """Machine and versions of this run."""
    cpu = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "command": "python -m " + " ".join([f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": git.stdout.strip() or "unknown",
        "cpu": cpu[0] if cpu else platform.processor(),
        "threads": THREADS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def publish(result: dict[str, Any], table: str, section: str, json_target: str | None, readme: str | None) -> None:
    """Save a result, print its table, and put that between the markers of `section` in a Markdown file."""
    save(result, json_target)
    if readme:
        path, begin, end = Path(readme), f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
        before, rest = path.read_text(encoding="utf-8").split(begin)
        _, after = rest.split(end)
        path.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")
    if json_target != "-":
        print(table)


def save(result: dict[str, Any], target: str | None) -> None:
    """Write JSON to a file, or to stdout for `-`."""
    text = json.dumps(result, indent=1)
    if target == "-":
        print(text)
    elif target:
        Path(target).write_text(text + "\n", encoding="utf-8")
