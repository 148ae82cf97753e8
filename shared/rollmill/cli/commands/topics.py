"""``rollmill topics``, ``tail`` and ``schemas``: the registry of topics, their records, their schema files."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rollmill.cli.options import AsJson, Bootstrap, Prefix, kafka_settings, on_kafka
from rollmill.errors import InvalidInputError

topics_app = typer.Typer(no_args_is_help=True, help="The topics: list, create, verify, describe.")


@topics_app.command("list")
def list_topics(as_json: AsJson = False, prefix: Prefix = None) -> None:
    """Print the full name and the meaning of every topic."""
    from rollmill.topics import REGISTRY  # noqa: PLC0415

    settings = kafka_settings(None, prefix)
    if as_json:
        typer.echo(json.dumps({topic.full_name(settings.prefix): topic.meaning for topic in REGISTRY}))
        return
    for topic in REGISTRY:
        typer.echo(f"{topic.full_name(settings.prefix):32} {topic.meaning}")


@topics_app.command("describe")
def describe_topic(topic: Annotated[str, typer.Argument(help="Name without the prefix.")]) -> None:
    """Print everything that the registry says of one topic, as JSON."""
    from rollmill.cli.generate.topics import topic_entry  # noqa: PLC0415

    typer.echo(json.dumps(topic_entry(_topic(topic), kafka_settings(None, None)), indent=2))


@topics_app.command("apply")
def apply_topics(bootstrap_servers: Bootstrap = None, prefix: Prefix = None) -> None:
    """Create the missing topics, then verify all of them."""
    from rollmill.runtime.kafka import admin  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    created = on_kafka(settings, admin.apply_topics(settings), verify=False)
    typer.echo("\n".join(f"created: {name}" for name in created) or "nothing to create")


@topics_app.command("verify")
def verify_topics(bootstrap_servers: Bootstrap = None, prefix: Prefix = None) -> None:
    """Compare the topics on the broker with the registry."""
    on_kafka(kafka_settings(bootstrap_servers, prefix), asyncio.sleep(0))
    typer.echo("the topics are as the registry says")


def tail(
    topic: Annotated[str, typer.Argument(help="Name without the prefix, e.g. trajectories")],
    from_beginning: Annotated[bool, typer.Option("--from-beginning", help="Start with the oldest record.")] = False,
    limit: Annotated[int | None, typer.Option(help="Stop after this many records.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not abbreviate arrays.")] = False,
    session: Annotated[str | None, typer.Option(help="Only records with this session's id as their key.")] = None,
    pretty: Annotated[bool, typer.Option("--pretty", help="Indent each record, instead of one line.")] = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Print the records of a topic as lines of JSON, decoded, until Ctrl-C."""
    from rollmill.cli.tail import follow  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    lines = follow(settings, _topic(topic), from_beginning=from_beginning, limit=limit, full=full, key=session)
    on_kafka(settings, _print_lines(lines, pretty=pretty))


def schemas(
    root: Annotated[Path, typer.Option(help="The source tree.")] = Path(),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 where a file differs.")] = False,
) -> None:
    """Write schemas/ and the README's table of topics from the models and the registry."""
    from rollmill.cli.generate.files import differing, write  # noqa: PLC0415

    paths = differing(root) if check else write(root)
    for path in paths:
        typer.echo(f"{'differs' if check else 'written'}: {path}")
    raise SystemExit(1 if check and paths else 0)


def _topic(name: str) -> Any:
    from rollmill.topics import REGISTRY  # noqa: PLC0415

    for topic in REGISTRY:
        if topic.name == name:
            return topic
    raise InvalidInputError(f"unknown topic {name!r}: known are {', '.join(topic.name for topic in REGISTRY)}")


async def _print_lines(lines: Any, *, pretty: bool) -> None:
    async for line in lines:
        sys.stdout.write((json.dumps(json.loads(line), indent=2, ensure_ascii=False) if pretty else line) + "\n")
        sys.stdout.flush()
