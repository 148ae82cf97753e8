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
    add_completion=False,
    pretty_exceptions_enable=False,  # what is left is a fault of ours: its whole traceback helps most
    help="From an agent's model calls to training batches.",
)
app.add_typer(config.app, name="config")
app.add_typer(topics.topics_app, name="topics")
app.add_typer(maintenance.batches_app, name="batches")
app.command("evals")(accounting.evals)
app.add_typer(dlq.app, name="dlq")
app.add_typer(maintenance.blobs_app, name="blobs")
app.command("replay")(replay.replay)
app.command("up")(services.up)
app.command("init")(services.init)
app.command("exec")(sessions.execute)
app.command("reward")(sessions.reward)
app.command("tail")(topics.tail)
app.command("inspect")(sessions.inspect)
app.command("ledger")(accounting.ledger)
app.command("schemas")(topics.schemas)
app.add_typer(tasks.app, name="tasks")


@app.command()
def version() -> None:
    """Print the version."""
    from rollmill import __version__  # noqa: PLC0415

    typer.echo(__version__)


@app.callback()
def options(
    config_file: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="Settings; else ROLLMILL_CONFIG, else rollmill.toml.")
    ] = None,
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
