"""Child processes, each a new interpreter: nothing is forked from a process that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing.context import SpawnProcess
from pathlib import Path

from dynaexq.__main__ import main

SPAWN = multiprocessing.get_context("spawn")


def start_command(output: Path, *arguments: str, reader: bool = True) -> SpawnProcess:
    """Start `dynaexq ARGUMENTS`, which prints to the file `output`; without a reader, its stdout is a broken pipe."""
    child = SPAWN.Process(target=_run_command, args=(output, arguments, dict(os.environ), reader), daemon=True)
    child.start()
    return child


def _run_command(output: Path, arguments: tuple[str, ...], environment: dict[str, str], reader: bool) -> None:
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    if not reader:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, sys.stdout.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite started in the background of a shell ignores it
    sys.argv = ["dynaexq", *arguments]
    main()
