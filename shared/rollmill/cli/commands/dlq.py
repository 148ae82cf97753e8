"""``rollmill dlq``: the commands and their options."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli.options import AsJson, Bootstrap, Prefix, kafka_settings, on_kafka

if TYPE_CHECKING:
    from rollmill.cli.dead_letters import DecisionOptions

app = typer.Typer(no_args_is_help=True, help="Dead letters: list, show, replay, drop.")

Numbers = Annotated[list[str] | None, typer.Argument(help="partition:offset, as `list` shows them.")]
Stage = Annotated[str | None, typer.Option(help="Only those that this stage set aside.")]
Reason = Annotated[str | None, typer.Option(help="Only those with this reason code.")]
Topic = Annotated[str | None, typer.Option(help="Only those from this topic, without the prefix.")]
Key = Annotated[str | None, typer.Option(help="Only those with this key, such as a session id.")]
Since = Annotated[str | None, typer.Option(help="Only those set aside since: an ISO 8601 time, or 2h ago as 2h.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")]
By = Annotated[str | None, typer.Option(help="Who decides; else the user of this process.")]


@app.command("list")
def list_letters(
    stage: Stage = None,
    reason: Reason = None,
    topic: Topic = None,
    key: Key = None,
    since: Since = None,
    state: Annotated[str, typer.Option(help="open, replayed, dropped or all.")] = "open",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per letter.")] = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """List dead letters, by default those that nothing was decided about."""
    from rollmill.cli.dead_letters import letter_filter, print_list  # noqa: PLC0415

    wanted = letter_filter((), stage, reason, topic, key, since, None if state == "all" else state, now=time.time())
    settings = kafka_settings(bootstrap_servers, prefix)
    on_kafka(settings, print_list(settings, wanted, as_json=as_json))


@app.command()
def show(
    number: Annotated[str, typer.Argument(help="partition:offset, as `list` shows it.")],
    full: Annotated[bool, typer.Option("--full", help="Do not abbreviate arrays.")] = False,
    as_json: AsJson = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Show one dead letter: reason, error, source position, headers, payload, decisions."""
    from rollmill.cli.dead_letters import print_letter  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    on_kafka(settings, print_letter(settings, number, full=full, as_json=as_json))


@app.command()
def replay(
    numbers: Numbers = None,
    stage: Stage = None,
    reason: Reason = None,
    topic: Topic = None,
    key: Key = None,
    since: Since = None,
    every: Annotated[bool, typer.Option("--all", help="All that are open, where no filter is given.")] = False,
    why: Annotated[str | None, typer.Option(help="Kept with the decision.")] = None,
    by: By = None,
    dry_run: DryRun = False,
    admit_old: Annotated[
        bool, typer.Option("--admit-old", help="Also what is too_old: only where it surely was never trained.")
    ] = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Write the bytes as received to their source topic again. A letter that was replayed is left alone."""
    from rollmill.cli.dead_letters import DecisionOptions  # noqa: PLC0415

    options = DecisionOptions("replay", why, by, dry_run, every, admit_old)
    _decide(options, numbers, stage, reason, topic, key, since, bootstrap_servers, prefix)


@app.command()
def drop(
    why: Annotated[str, typer.Option(help="Kept with the decision.")],
    numbers: Numbers = None,
    stage: Stage = None,
    reason: Reason = None,
    topic: Topic = None,
    key: Key = None,
    since: Since = None,
    every: Annotated[bool, typer.Option("--all", help="All that are open, where no filter is given.")] = False,
    by: By = None,
    dry_run: DryRun = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Decide that letters stay dead, and record who decided and why. Nothing is deleted."""
    from rollmill.cli.dead_letters import DecisionOptions  # noqa: PLC0415

    options = DecisionOptions("drop", why, by, dry_run, every)
    _decide(options, numbers, stage, reason, topic, key, since, bootstrap_servers, prefix)


def _decide(
    options: DecisionOptions,
    numbers: list[str] | None,
    stage: str | None,
    reason: str | None,
    topic: str | None,
    key: str | None,
    since: str | None,
    bootstrap_servers: str | None,
    prefix: str | None,
) -> None:
    from rollmill.cli.dead_letters import decide, letter_filter  # noqa: PLC0415

    state: Any = None if numbers else "open"
    wanted = letter_filter(numbers or (), stage, reason, topic, key, since, state, now=time.time())
    settings = kafka_settings(bootstrap_servers, prefix)
    on_kafka(settings, decide(settings, wanted, options))
