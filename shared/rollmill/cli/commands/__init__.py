"""``rollmill``: the commands and their options, a file per group of commands, assembled here.

services (up, init), sessions (exec, reward, inspect), accounting (ledger, evals), topics (topics, tail, schemas), dlq,
tasks, maintenance (batches, blobs), replay. These files define options and messages only: what a command does is
imported from `rollmill.cli`, `rollmill.ops` and `rollmill.runtime` when it runs, so that ``rollmill --help`` is quick.
"""

from __future__ import annotations

import logging
import os
from typing import Annotated, NoReturn

import typer

from rollmill.cli.commands import accounting, config, dlq, maintenance, replay, services, sessions, tasks, topics
from rollmill.errors import EXIT_FATAL, FatalError, RollmillError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # what is left is a fault of ours: its whole traceback helps most
    help="From an agent's model calls to training batches.",
)
RUN, LOOK, DECIDE, SOURCES = "Run", "Look at a run", "Decide about a run", "Topics, settings, schemas"
"""Panels of ``--help``."""

app.command("init", rich_help_panel=RUN)(services.init)
app.command("up", rich_help_panel=RUN)(services.up)
app.command("exec", rich_help_panel=RUN)(sessions.execute)
app.command("ledger", rich_help_panel=LOOK)(accounting.ledger)
app.command("inspect", rich_help_panel=LOOK)(sessions.inspect)
app.command("tail", rich_help_panel=LOOK)(topics.tail)
app.command("evals", rich_help_panel=LOOK)(accounting.evals)
app.command("reward", rich_help_panel=DECIDE)(sessions.reward)
app.add_typer(dlq.app, name="dlq", rich_help_panel=DECIDE)
app.add_typer(tasks.app, name="tasks", rich_help_panel=DECIDE)
app.command("replay", rich_help_panel=DECIDE)(replay.replay)
app.add_typer(maintenance.batches_app, name="batches", rich_help_panel=DECIDE)
app.add_typer(maintenance.blobs_app, name="blobs", rich_help_panel=DECIDE)
app.add_typer(config.app, name="config", rich_help_panel=SOURCES)
app.add_typer(topics.topics_app, name="topics", rich_help_panel=SOURCES)
app.command("schemas", rich_help_panel=SOURCES)(topics.schemas)


@app.command(rich_help_panel=SOURCES)
def version() -> None:
    """Print the version."""
    from rollmill import __version__  # noqa: PLC0415

    typer.echo(__version__)


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    config_file: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="Settings; else ROLLMILL_CONFIG, else rollmill.toml.")
    ] = None,
    _: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Set what all commands have."""
    if config_file is not None:
        os.environ["ROLLMILL_CONFIG"] = config_file


def main() -> None:
    """Run the command line; what a person can cause becomes one line on standard error and an exit code."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # the message of the command names the cause
    try:
        app()
    except RollmillError as error:
        _end(str(error), error.exit_code if isinstance(error, FatalError) else EXIT_FATAL)
    except OSError as error:
        if error.filename is None:
            raise
        _end(f"{error.filename}: {error.strerror}", EXIT_FATAL)


def _end(message: str, code: int) -> NoReturn:
    typer.echo(f"rollmill: {message}", err=True)
    raise SystemExit(code)
