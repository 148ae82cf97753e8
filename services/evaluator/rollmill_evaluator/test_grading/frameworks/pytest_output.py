"""pytest: the short summary of ``-rA``, and the lines of ``-v``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollmill_evaluator.test_grading.frameworks.results import Results, Status, clean_lines, worst_statuses

STATUSES = {
    "PASSED": Status.PASSED,
    "XFAIL": Status.PASSED,
    "XPASS": Status.PASSED,
    "SKIPPED": Status.SKIPPED,
    "FAILED": Status.FAILED,
    "ERROR": Status.FAILED,
}
ANY = "|".join(STATUSES)
SUMMARY = re.compile(r"^=+ short test summary info =+$")
SUMMED = re.compile(rf"^(?P<status>{ANY}) (?P<rest>\S.*)$")
NODE = re.compile(r"^[^\s:]+::\S")
VERBOSE = re.compile(rf" (?P<status>{ANY})(?= \(| +\[|$)")
DISTRIBUTED = re.compile(rf"^\[gw\d+\] \[ *\d+%\] (?P<status>{ANY}) (?P<name>\S.*)$")


def read(text: str, _report: bytes | None) -> Results:
    """Node ids as pytest prints them: ``tests/test_a.py::TestA::test_b[param]``.

    Summary lines count only after the last heading of a summary: what tests printed themselves comes before it.
    """
    lines = clean_lines(text)
    starts = [number for number, line in enumerate(lines) if SUMMARY.match(line)]
    start = starts[-1] if starts else len(lines)
    return worst_statuses([*_running(lines[:start]), *_summed(lines[start:])])


def _running(lines: list[str]) -> Iterator[tuple[str, Status]]:
    for line in lines:
        if match := DISTRIBUTED.match(line):
            yield match["name"].rstrip(), STATUSES[match["status"]]
        elif NODE.match(line) and (match := VERBOSE.search(line)):
            yield line[: match.start()], STATUSES[match["status"]]


def _summed(lines: list[str]) -> Iterator[tuple[str, Status]]:
    for line in lines:
        if match := SUMMED.match(line):
            name = _name(match["rest"])
            if not name.startswith("["):  # SKIPPED [2] tests/test_a.py:3: a place, not a test
                yield name, STATUSES[match["status"]]


def _name(rest: str) -> str:
    """The node id without the message after `` - ``; a parameter may hold a dash, too."""
    bracket = rest.find("[")
    first = rest.find(" - ")
    if bracket < 0 or 0 <= first < bracket:
        return rest[:first] if first >= 0 else rest
    closing = rest.find("] - ", bracket)
    return rest[: closing + 1] if closing >= 0 else rest
