"""The `dynaexq` command, and `python -m dynaexq`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C is clean during the imports too, which take most of a short run."""
    try:
        from dynaexq.cli.app import run  # noqa: PLC0415

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
