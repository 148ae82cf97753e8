"""Events from a file, one JSON object per line. An unreadable line is reported by its number; reading goes on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

from rollmill.codec import JSON, Headers, decode
from rollmill.errors import PoisonRecordError
from rollmill.models import CompletionEvent, CompletionRecord

AS_JSON: Headers = (("content-type", JSON.encode()),)


@dataclass(frozen=True)
class EventsRead:
    """The events of a file or a topic."""

    events: tuple[CompletionEvent, ...]
    problems: tuple[str, ...]
    """One message for each unreadable record, with its position."""


def read_lines(lines: Iterable[bytes]) -> EventsRead:
    """Each line is an event, a bare completion record, or a line of ``rollmill tail completions --full``."""
    events: list[CompletionEvent] = []
    problems: list[str] = []
    for number, text in enumerate(lines, 1):
        try:
            if text.strip():
                events.append(_event(text.strip()))
        except PoisonRecordError as error:
            problems.append(f"line {number}: {error}")
    return EventsRead(tuple(events), tuple(problems))


def _event(text: bytes) -> CompletionEvent:
    try:
        data: Any = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise PoisonRecordError("malformed", str(error)) from error
    if not isinstance(data, dict):
        raise PoisonRecordError("malformed", "a JSON object is expected")
    if isinstance(data.get("value"), dict) and "offset" in data:
        data = data["value"]
    kind = CompletionEvent if "type" in data else CompletionRecord
    event: CompletionEvent = decode(kind, orjson.dumps(data), AS_JSON)
    return event
