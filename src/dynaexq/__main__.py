"""The `dynaexq` command, and `python -m dynaexq`."""

from __future__ import annotations

import os
import sys

SPINS = "10000"
"""Rounds that an idle OpenMP thread waits by spinning, well under a millisecond. The usual 300,000 are as fast on idle
cores, and on shared ones rob the thread that has work to do: two threads then were slower than one."""


def main() -> None:
    """Run the command line; Ctrl-C is clean during the imports too, which take most of a short run."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch loads its runtime
    try:
        from dynaexq.cli.app import run  # noqa: PLC0415

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
