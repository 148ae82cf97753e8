"""``rollmill tasks``: the commands and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from rollmill.cli.options import Bootstrap, Prefix, kafka_settings, on_kafka
from rollmill.errors import EXIT_NOT_IN_ORDER

app = typer.Typer(no_args_is_help=True, help="Tasks that have stopped over their limit of dead letters.")

Name = Annotated[str, typer.Argument(help="Of the task, as `list` shows it, such as builder.3.")]
By = Annotated[str | None, typer.Option(help="Who decides; else the user of this process.")]
Why = Annotated[str, typer.Option(help="Kept with the decision, and in the dead letter.")]


@app.command("list")
def list_tasks(
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per task.")] = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Show stopped tasks, each with the record in hand and its error. Exit code 3: there is one."""
    from rollmill.cli.stopped_tasks import print_stopped  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    stopped = on_kafka(settings, print_stopped(settings, as_json=as_json))
    raise SystemExit(EXIT_NOT_IN_ORDER if stopped else 0)


@app.command()
def retry(name: Name, why: Why = "", by: By = None, bootstrap_servers: Bootstrap = None, prefix: Prefix = None) -> None:
    """Let a task go on with the record in hand, with an empty budget of dead letters."""
    _decide("retry", name, why, by, bootstrap_servers, prefix)


@app.command("set-aside")
def set_aside(name: Name, why: Why, by: By = None, bootstrap_servers: Bootstrap = None, prefix: Prefix = None) -> None:
    """Make the record in hand a dead letter, which can be replayed later, and let the task go on behind it."""
    _decide("set_aside", name, why, by, bootstrap_servers, prefix)


@app.command()
def skip(name: Name, why: Why, by: By = None, bootstrap_servers: Bootstrap = None, prefix: Prefix = None) -> None:
    """Make the record in hand a dead letter that counts as dropped, and let the task go on behind it."""
    _decide("skip", name, why, by, bootstrap_servers, prefix)


def _decide(
    decision: str, name: str, why: str, by: str | None, bootstrap_servers: str | None, prefix: str | None
) -> None:
    from rollmill.cli.stopped_tasks import decide_about  # noqa: PLC0415
    from rollmill.runtime.stream.task_stop import Decision  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    on_kafka(settings, decide_about(settings, name, Decision(decision), by, why))
