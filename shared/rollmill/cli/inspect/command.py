"""``rollmill inspect``: finds the sessions, builds those that were not built, and shows them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
from rich.console import Console

from rollmill.cli.inspect.drawing import Pen, draw
from rollmill.cli.inspect.event_file import EventsRead, read_lines
from rollmill.cli.inspect.recordings import Recording, Recordings
from rollmill.cli.inspect.session_log import read_session
from rollmill.cli.inspect.token_text import ids_only, pieces_of
from rollmill.cli.inspect.views import SessionView, view_of
from rollmill.errors import InvalidInputError
from rollmill.models import CompletionSession, StrategySpec, Trajectory, TrajectoryStatus, is_identifier
from rollmill.settings import KafkaSettings
from rollmill.strategies import BaseTrajectoryBuilder, builder_registry, trajectory_of
from rollmill.strategies.allow_list import allowed_by_hand
from rollmill.strategies.foreign_code import contained, describe

PIPE_WIDTH = 120
"""Columns, at least, where the output is no terminal."""


STDIN = "-"


@dataclass(frozen=True)
class SessionQuery:
    """Which sessions, and built by what."""

    source: str
    attempt: int | None = None
    """None: all attempts."""
    builder: str | None = None
    """None: what the log holds, else the session's own builder."""
    config: dict[str, Any] | None = None


def find_sessions(query: SessionQuery, settings: KafkaSettings) -> tuple[list[SessionView], tuple[str, ...]]:
    """The views of the sessions, and the records that could not be read. Raises InvalidInputError for no session."""
    recorded = Recordings()
    read, built = _read(query.source, settings)
    for event in read.events:
        recorded.take(event)
    for trajectory in built:
        recorded.built(trajectory)
    recordings = [item for item in recorded.recordings if query.attempt in (None, item.attempt)]
    if not recordings:
        raise InvalidInputError(_not_found(query, read))
    return [_view(item, query) for item in recordings], read.problems


def _read(source: str, settings: KafkaSettings) -> tuple[EventsRead, tuple[Trajectory, ...]]:
    if source == STDIN:
        return read_lines(sys.stdin.buffer), ()
    path = Path(source)
    if path.is_file():
        with path.open("rb") as lines:
            return read_lines(lines), ()
    if not is_identifier(source) or source.endswith((".jsonl", ".json")):
        raise InvalidInputError(f"{source} is neither a file nor a session id")
    return asyncio.run(read_session(settings, source))


def _not_found(query: SessionQuery, read: EventsRead) -> str:
    which = "" if query.attempt is None else f" attempt {query.attempt} of"
    unread = "".join(f"\n  {problem}" for problem in read.problems)
    return f"there is no record of{which} {query.source}; a log keeps completions for a week{unread}"


def _view(recording: Recording, query: SessionQuery) -> SessionView:
    given = query.builder is not None or query.config is not None
    if recording.built is not None and not given:
        return view_of(recording, recording.built, from_log=True)
    own = recording.spec.builder
    spec = StrategySpec(strategy=query.builder or own.strategy, config=query.config or {}) if given else own
    with allowed_by_hand([query.builder, query.config]):
        builder = builder_registry().create(spec)
    return view_of(recording, _built(builder, recording.session()), from_log=False)


def _built(builder: BaseTrajectoryBuilder, session: CompletionSession) -> Trajectory:
    """As in the builder, a strategy that fails gives one session that failed, and the others are shown."""
    try:
        with contained():
            return builder.build(session)
    except Exception as error:  # noqa: BLE001  # foreign code can raise anything
        return trajectory_of(session, status=TrajectoryStatus.ERROR, error=f"the builder failed: {describe(error)}")


def show(
    query: SessionQuery, settings: KafkaSettings, tokenizer: str | None, *, full: bool, as_json: bool
) -> tuple[str, ...]:
    """Print the sessions; returns a message for each unreadable record. Raises InvalidInputError."""
    pen = Pen(ids_only if tokenizer is None else pieces_of(tokenizer), full)
    views, problems = find_sessions(query, settings)
    if as_json:
        sys.stdout.writelines(json_line(view) + "\n" for view in views)
    else:
        print_views(views, pen, sys.stdout)
    return problems


def print_views(views: Iterable[SessionView], pen: Pen, out: IO[str]) -> None:
    """Trees, with colours where ``out`` is a terminal that has them; else plain, and no wider than needed."""
    console = Console(file=out, highlight=False)
    if console.is_terminal:
        console.print(*(draw(view, pen) for view in views), sep="\n")
        return
    console.width = max(console.width, PIPE_WIDTH)
    with console.capture() as capture:
        console.print(*(draw(view, pen) for view in views), sep="\n")
    out.writelines(line.rstrip() + "\n" for line in capture.get().splitlines())


def json_line(view: SessionView) -> str:
    return orjson.dumps(view).decode()
