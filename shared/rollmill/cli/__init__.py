"""The command line. Every command imports what it needs when it runs, so that ``rollmill --help`` is quick."""

from rollmill.cli.commands import main

__all__ = ["main"]
