"""Go: ``go test -json``, or ``go test -v``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from rollmill_evaluator.test_grading.frameworks.results import Results, Status, clean_lines, worst_statuses

ACTIONS = {"pass": Status.PASSED, "fail": Status.FAILED, "skip": Status.SKIPPED}
POINT = re.compile(r"^ *--- (?P<status>PASS|FAIL|SKIP): (?P<name>\S+) \(")
PACKAGE = re.compile(r"^(?:ok|FAIL|---) *\t(?P<package>\S+)")


def read(text: str, _report: bytes | None) -> Results:
    """Names as ``package::TestName/subtest``."""
    lines = clean_lines(text)
    events = [event for line in lines if line.startswith("{") and (event := _event(line)) is not None]
    return worst_statuses(_from_events(events) if events else _from_lines(lines))


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and "Action" in event else None


def _from_events(events: list[dict[str, Any]]) -> Iterator[tuple[str, Status]]:
    for event in events:
        if event["Action"] in ACTIONS and "Test" in event:
            yield f"{event.get('Package', '')}::{event['Test']}", ACTIONS[event["Action"]]


def _from_lines(lines: list[str]) -> Iterator[tuple[str, Status]]:
    """A package is named after its tests."""
    waiting: list[tuple[str, Status]] = []
    for line in lines:
        if point := POINT.match(line):
            waiting.append((point["name"], ACTIONS[point["status"].lower()]))
        elif package := PACKAGE.match(line):
            yield from ((f"{package['package']}::{name}", status) for name, status in waiting)
            waiting = []
