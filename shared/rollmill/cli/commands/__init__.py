"""``rollmill``: the commands and their options, a file per group of commands, assembled here.

services (up), sessions (exec, reward, inspect), accounting (ledger, evals), topics (topics, tail, schemas), dlq,
tasks, maintenance (batches, blobs), replay. These files define options and messages only: what a command does is
imported from `rollmill.cli`, `rollmill.ops` and `rollmill.runtime` when it runs, so that ``rollmill --help`` is quick.
"""

from __future__ import annotations

import typer

from rollmill.cli.commands import accounting, dlq, maintenance, replay, services, sessions, tasks, topics
from rollmill.errors import EXIT_FATAL, FatalError, RollmillError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="From an agent's model calls to training batches.")
app.add_typer(topics.topics_app, name="topics")
app.add_typer(maintenance.batches_app, name="batches")
app.command("evals")(accounting.evals)
app.add_typer(dlq.app, name="dlq")
app.add_typer(maintenance.blobs_app, name="blobs")
app.command("replay")(replay.replay)
app.command("up")(services.up)
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


def main() -> None:
    """Run the command line; a `RollmillError` becomes one line on standard error and an exit code."""
    try:
        app()
    except RollmillError as error:
        typer.echo(f"rollmill: {error}", err=True)
        raise SystemExit(error.exit_code if isinstance(error, FatalError) else EXIT_FATAL) from error
