"""The Test Anything Protocol: node's own runner, mocha's ``--reporter tap``, and others."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollmill_evaluator.test_grading.frameworks.results import Results, Status, clean_lines, worst_statuses

POINT = re.compile(r"^(?P<indent> *)(?P<bad>not )?ok\b(?: \d+)?(?: -)?(?P<rest> .*)?$")
SUBTEST = re.compile(r"^(?P<indent> *)# Subtest: (?P<name>.*)$")
BAIL = re.compile(r"^Bail out!")
JOIN = " > "


def read(text: str, _report: bytes | None) -> Results:
    """Names as ``parent > child``."""
    return worst_statuses(_found(clean_lines(text)))


def _found(lines: list[str]) -> Iterator[tuple[str, Status]]:
    parents: list[tuple[int, str]] = []
    for line in lines:
        if BAIL.match(line):
            return
        if subtest := SUBTEST.match(line):
            parents = _above(parents, len(subtest["indent"]))
            parents.append((len(subtest["indent"]), subtest["name"]))
        elif point := POINT.match(line):
            parents = _above(parents, len(point["indent"]))
            name, _, directive = (point["rest"] or "").partition(" # ")
            if name.strip():
                yield JOIN.join([*(parent for _, parent in parents), name.strip()]), _status(point, directive)


def _above(parents: list[tuple[int, str]], indent: int) -> list[tuple[int, str]]:
    return [parent for parent in parents if parent[0] < indent]


def _status(point: re.Match[str], directive: str) -> Status:
    keyword = directive.strip().upper()
    if keyword.startswith("SKIP"):
        return Status.SKIPPED
    return Status.FAILED if point["bad"] and not keyword.startswith("TODO") else Status.PASSED
