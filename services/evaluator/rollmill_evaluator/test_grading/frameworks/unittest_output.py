"""unittest with ``-v``, and what is built like it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollmill_evaluator.test_grading.frameworks.results import Results, Status, clean_lines, worst_statuses

BEGINS = re.compile(r"^(?P<method>[\w<>]+) \((?P<where>[\w.<>]+)\)(?P<subtest> .*)?$")
ENDS = re.compile(r"(?P<status>ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$")
FAILED = re.compile(r"^(?:FAIL|ERROR): (?P<method>[\w<>]+) \((?P<where>[\w.<>]+)\)")
STATUSES = {
    "ok": Status.PASSED,
    "expected failure": Status.PASSED,
    "unexpected success": Status.FAILED,
    "FAIL": Status.FAILED,
    "ERROR": Status.FAILED,
}


def read(text: str, _report: bytes | None) -> Results:
    """Names as ``package.module.Class.method``, whichever way a version of Python prints them."""
    return worst_statuses(_found(clean_lines(text)))


def _found(lines: list[str]) -> Iterator[tuple[str, Status]]:
    current: str | None = None
    for line in lines:
        if failed := FAILED.match(line):
            yield _full(failed["method"], failed["where"]), Status.FAILED
            continue
        # A docstring's first line, or output of the test, can come between a test's name and its status.
        begins = BEGINS.match(line.split(" ... ")[0])
        if begins and not begins["subtest"]:
            current = _full(begins["method"], begins["where"])
        ends = ENDS.search(line.rpartition(" ... ")[2] if " ... " in line else line)
        if current is not None and ends and _is_end(line, ends["status"]):
            yield current, STATUSES.get(ends["status"], Status.SKIPPED)
            current = None


def _is_end(line: str, status: str) -> bool:
    return line == status or " ... " in line


def _full(method: str, where: str) -> str:
    """Python 3.11 prints the method in the brackets, too."""
    return where if where.rpartition(".")[2] == method else f"{where}.{method}"
