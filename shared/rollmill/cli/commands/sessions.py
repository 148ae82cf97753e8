"""``rollmill exec``, ``reward`` and ``inspect``: run a command as a session, grade a session, explain its traces."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli.options import Bootstrap, Prefix, json_object, kafka_settings
from rollmill.errors import InvalidInputError

if TYPE_CHECKING:
    from rollmill.client import Session

NOT_FOUND = 127
BY_SIGNAL = 128
SHOWN_PROBLEMS = 10
"""Exit codes as a shell has them."""


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
    from rollmill.client import session  # noqa: PLC0415

    graders = [{"strategy": strategy} for strategy in evaluator or ()]
    spec: dict[str, Any] = {"evaluators": graders, "purpose": purpose, "policy": policy}
    opened = session(task, group=group, group_size=group_size, url=url, patience=patience, **spec)
    raise SystemExit(run_in_session(opened, command))


def reward(
    session_id: Annotated[str, typer.Argument(help="The session, open or closed.")],
    value: Annotated[float, typer.Argument(help="The reward.")],
    evaluator: Annotated[
        str, typer.Option(help="Who grades: an evaluator of the session's spec, or any name.")
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
    from rollmill.cli.inspect.command import SessionQuery, show  # noqa: PLC0415

    query = SessionQuery(source, attempt, builder, json_object(config))
    problems = show(query, kafka_settings(bootstrap_servers, prefix), tokenizer, full=full, as_json=as_json)
    for problem in problems[:SHOWN_PROBLEMS]:
        typer.echo(f"rollmill: {source}, {problem}", err=True)
    if len(problems) > SHOWN_PROBLEMS:
        typer.echo(f"rollmill: {source}, and {len(problems) - SHOWN_PROBLEMS} more", err=True)


def run_in_session(session: Session, command: Sequence[str]) -> int:
    """Run ``command`` in a session, which is closed with the command's exit code. Returns the exit code."""
    if not command:
        raise InvalidInputError("no command is given: name one, e.g. `rollmill exec --task t1 -- python agent.py`")
    with session:
        code = _run(command, {**os.environ, **session.environment})
        session.finish(error=None if code == 0 else f"exit code {code}")
    return code


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    try:
        process = subprocess.Popen(command, env=environment)  # noqa: S603  # the user's own command
    except FileNotFoundError:
        typer.echo(f"rollmill: {command[0]}: command not found", err=True)
        return NOT_FOUND
    with _forwarding_signals(process):
        code = process.wait()
    return BY_SIGNAL - code if code < 0 else code


@contextmanager
def _forwarding_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals go to the command; this process stays, to close the session."""

    def forward(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
