"""unittest with ``-v``, and what is built like it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollmill_evaluator.test_grading.frameworks.results import Results, Status, collected, lines_of

BEGINS = re.compile(r"^(?P<method>[\w<>]+) \((?P<where>[\w.<>]+)\)(?P<subtest> .*)?$")
ENDS = re.compile(r"(?P<word>ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)$")
FAILED = re.compile(r"^(?:FAIL|ERROR): (?P<method>[\w<>]+) \((?P<where>[\w.<>]+)\)")
WORDS = {
    "ok": Status.PASSED,
    "expected failure": Status.PASSED,
    "unexpected success": Status.FAILED,
    "FAIL": Status.FAILED,
    "ERROR": Status.FAILED,
}


def read(text: str, _report: bytes | None) -> Results:
    """Names as ``package.module.Class.method``, whichever way a version of Python prints them."""
    return collected(_found(lines_of(text)))


def _found(lines: list[str]) -> Iterator[tuple[str, Status]]:
    current: str | None = None
    for line in lines:
        if failed := FAILED.match(line):
            yield _full(failed["method"], failed["where"]), Status.FAILED
            continue
        # A docstring's first line, or what the test printed, can stand between a name and its end.
        begins = BEGINS.match(line.split(" ... ")[0])
        if begins and not begins["subtest"]:
            current = _full(begins["method"], begins["where"])
        ends = ENDS.search(line.rpartition(" ... ")[2] if " ... " in line else line)
        if current is not None and ends and _is_end(line, ends["word"]):
            yield current, WORDS.get(ends["word"], Status.SKIPPED)
            current = None


def _is_end(line: str, word: str) -> bool:
    return line == word or " ... " in line


def _full(method: str, where: str) -> str:
    """Python 3.11 prints the method in the brackets, too."""
    return where if where.rpartition(".")[2] == method else f"{where}.{method}"
