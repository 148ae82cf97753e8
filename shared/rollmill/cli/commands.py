"""``rollmill``: the commands and their options. What they do lives in modules of its own, imported when they run."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from rollmill.cli import batches_commands, blobs_commands, dlq_commands, evals_command, replay_command
from rollmill.cli.options import AsJson, Bootstrap, Prefix, json_object, kafka_settings, on_kafka
from rollmill.errors import EXIT_FATAL, ConfigurationError, FatalError, InvalidInputError, RollmillError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="From an agent's model calls to training batches.")
topics_app = typer.Typer(no_args_is_help=True, help="The topics: list, create, verify, describe.")
app.add_typer(topics_app, name="topics")
app.add_typer(batches_commands.app, name="batches")
app.command("evals")(evals_command.evals)
app.add_typer(dlq_commands.app, name="dlq")
app.add_typer(blobs_commands.app, name="blobs")
app.command("replay")(replay_command.replay)


def main() -> None:
    """Run the command line; an error of ours is one line on standard error and an exit code."""
    try:
        app()
    except RollmillError as error:
        typer.echo(f"rollmill: {error}", err=True)
        raise SystemExit(error.exit_code if isinstance(error, FatalError) else EXIT_FATAL) from error


@app.command()
def up(
    upstream: Annotated[str, typer.Option(help="Base URL of the model server, e.g. http://127.0.0.1:8000")],
    data_dir: Annotated[Path, typer.Option(help="Kafka's data and the services' logs.")] = Path(".rollmill"),
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
    port: Annotated[int, typer.Option(help="Of capture.")] = 8700,
    kafka_port: Annotated[int, typer.Option(help="Of the Kafka that is started here.")] = 9092,
) -> None:
    """Run Kafka (unless --bootstrap-servers names one) and all five services here, until Ctrl-C."""
    from rollmill.cli.up import Up, run  # noqa: PLC0415

    _require_services()
    raise SystemExit(asyncio.run(run(Up(upstream, data_dir, bootstrap_servers, prefix, port, kafka_port))))


@app.command("exec")
def execute(
    command: Annotated[list[str], typer.Argument(help="What to run, after `--`.")],
    task: Annotated[str | None, typer.Option(help="Id of the task.")] = None,
    group: Annotated[str | None, typer.Option(help="Id of the group that answers the same prompt.")] = None,
    group_size: Annotated[int, typer.Option(help="Sessions in the group.")] = 1,
    evaluator: Annotated[list[str] | None, typer.Option(help="Strategy that grades; may be repeated.")] = None,
    purpose: Annotated[str, typer.Option(help="train, eval or collect.")] = "train",
    policy: Annotated[str, typer.Option(help="Name of the policy.")] = "policy",
    url: Annotated[str | None, typer.Option(help="Of capture; else ROLLMILL_CAPTURE_URL.")] = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait while capture admits no more.")] = 600.0,
) -> None:
    """Run a command as one session: its OpenAI, Anthropic or Gemini SDK talks to capture by its environment."""
    from rollmill.cli.execute import execute as run  # noqa: PLC0415
    from rollmill.client import session  # noqa: PLC0415

    graders = [{"strategy": strategy} for strategy in evaluator or ()]
    spec: dict[str, Any] = {"evaluators": graders, "purpose": purpose, "policy": policy}
    made = session(task, group=group, group_size=group_size, url=url, patience=patience, **spec)
    raise SystemExit(run(made, command))


@app.command()
def reward(
    session_id: Annotated[str, typer.Argument(help="The session, open or closed.")],
    value: Annotated[float, typer.Argument(help="The reward.")],
    evaluator: Annotated[
        str, typer.Option(help="Who says it: an evaluator of the session's spec, or any name.")
    ] = "human",
    evaluation_id: Annotated[str | None, typer.Option("--id", help="Of the evaluation; else made from it.")] = None,
    supersedes: Annotated[str | None, typer.Option(help="Id of the evaluation that this one revises.")] = None,
    attempt: Annotated[int | None, typer.Option(help="Of the session; else its newest.")] = None,
    url: Annotated[str | None, typer.Option(help="Of capture; else ROLLMILL_CAPTURE_URL.")] = None,
) -> None:
    """Grade a session by hand; prints the id of the evaluation."""
    from rollmill.client import reward as give  # noqa: PLC0415

    named: dict[str, Any] = {"evaluation_id": evaluation_id, "supersedes": supersedes, "attempt": attempt}
    fields: dict[str, Any] = {name: given for name, given in named.items() if given is not None}
    typer.echo(give(session_id, value, url=url, evaluator=evaluator, **fields))


@app.command()
def tail(
    topic: Annotated[str, typer.Argument(help="Name without the prefix, e.g. trajectories")],
    from_beginning: Annotated[bool, typer.Option("--from-beginning", help="Start with the oldest record.")] = False,
    limit: Annotated[int | None, typer.Option(help="Stop after this many records.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not abbreviate arrays.")] = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Print the records of a topic as lines of JSON, decoded, until Ctrl-C."""
    from rollmill.cli.tail import follow  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    lines = follow(settings, _topic(topic), from_beginning=from_beginning, limit=limit, full=full)
    on_kafka(settings, _print_lines(lines))


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="A JSONL file of completion events (- reads stdin), or a session id.")],
    attempt: Annotated[int | None, typer.Option(help="Only this attempt of a session.")] = None,
    builder: Annotated[str | None, typer.Option(help="Build with this strategy instead of the session's own.")] = None,
    config: Annotated[str | None, typer.Option(help="Its configuration, a JSON object.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Show texts: a tokenizer.json, or module:callable that decodes a list of ids.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not abbreviate long runs of tokens.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON per session.")] = False,
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Show why a session became these traces: its calls as a tree, masks by token, breaks, exclusions."""
    from rollmill.cli.inspect.command import Wanted, show  # noqa: PLC0415

    wanted = Wanted(source, attempt, builder, json_object(config))
    problems = show(wanted, kafka_settings(bootstrap_servers, prefix), tokenizer, full=full, as_json=as_json)
    for problem in problems:
        typer.echo(f"rollmill: {source}, {problem}", err=True)


@app.command()
def ledger(
    as_json: AsJson = False,
    settle: Annotated[bool, typer.Option("--settle", help="Wait until nothing is pending.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C or settled.")] = False,
    timeout: Annotated[float, typer.Option(help="Longest wait of --settle, in seconds.")] = 60.0,
    every: Annotated[float | None, typer.Option(help="Seconds between two looks; else 2 with --watch.")] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Serve the balance for Prometheus on this port instead of printing it, until SIGTERM."),
    ] = None,
    metrics_host: Annotated[str, typer.Option(help="Address to serve it on.")] = "127.0.0.1",
    bootstrap_servers: Bootstrap = None,
    prefix: Prefix = None,
) -> None:
    """Balance captured against trained, excluded, dead-lettered and pending. Exit code 1: tokens lost or doubled."""
    from rollmill.cli.ledger import Wanted, run  # noqa: PLC0415

    settings = kafka_settings(bootstrap_servers, prefix)
    if metrics_port is not None:
        from rollmill.cli.ledger_exporter import export  # noqa: PLC0415

        on_kafka(settings, export(settings, metrics_host, metrics_port, 15.0 if every is None else every))
        return
    pause = every if every is not None else 2.0 if watch else 0.5
    balance = on_kafka(settings, run(settings, Wanted(as_json, settle, watch, timeout, pause)))
    raise SystemExit(0 if balance.balanced else 1)


@app.command()
def schemas(
    root: Annotated[Path, typer.Option(help="The source tree.")] = Path(),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 where a file differs.")] = False,
) -> None:
    """Write schemas/ and the README's table of topics from the models and the registry."""
    from rollmill.cli.generated import differing, write  # noqa: PLC0415

    paths = differing(root) if check else write(root)
    for path in paths:
        typer.echo(f"{'differs' if check else 'written'}: {path}")
    raise SystemExit(1 if check and paths else 0)


@app.command()
def version() -> None:
    """Print the version."""
    from rollmill import __version__  # noqa: PLC0415

    typer.echo(__version__)


@topics_app.command("list")
def list_topics(prefix: Prefix = None) -> None:
    """Print the full name and the meaning of every topic."""
    from rollmill.topics import REGISTRY  # noqa: PLC0415

    settings = kafka_settings(None, prefix)
    for topic in REGISTRY:
        typer.echo(f"{topic.full_name(settings.prefix):32} {topic.meaning}")


@topics_app.command("describe")
def describe_topic(topic: Annotated[str, typer.Argument(help="Name without the prefix.")]) -> None:
    """Print everything that the registry says of one topic, as JSON."""
    from rollmill.cli.topic_files import topic_entry  # noqa: PLC0415

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


def _require_services() -> None:
    missing = [name for name in ("faststream", "starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the services are not installed ({', '.join(missing)}): pip install 'rollmill[services,embedded]'"
        )


def _topic(name: str) -> Any:
    from rollmill.topics import REGISTRY  # noqa: PLC0415

    for topic in REGISTRY:
        if topic.name == name:
            return topic
    raise InvalidInputError(f"unknown topic {name!r}: known are {', '.join(topic.name for topic in REGISTRY)}")


async def _print_lines(lines: Any) -> None:
    async for line in lines:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
