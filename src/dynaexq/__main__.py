"""`python -m dynaexq` is the `dynaexq` command."""

from dynaexq.cli.app import main

main()
