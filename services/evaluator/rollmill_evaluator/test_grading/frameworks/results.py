"""Statuses of tests by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum

ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")

LONGEST_LINE = 4096


class Status(StrEnum):
    """``passed`` includes a failure that was expected (xfail, TODO)."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"


Results = dict[str, Status]

SEVERITY = {Status.PASSED: 0, Status.SKIPPED: 1, Status.FAILED: 2}


def worst_statuses(found: Iterable[tuple[str, Status]]) -> Results:
    """By name, the worst status that was reported."""
    results: Results = {}
    for name, status in found:
        known = results.get(name)
        if known is None or SEVERITY[status] > SEVERITY[known]:
            results[name] = status
    return results


def clean_lines(text: str) -> list[str]:
    """Lines without colours, and without what progress bars overwrote by carriage returns.

    Lines longer than any test name are blanked: parsing must take no more time than in proportion to the output.
    """
    lines = ANSI.sub("", text).replace("\r\n", "\n").split("\n")
    return ["" if len(line) > LONGEST_LINE else line.rsplit("\r", 1)[-1] for line in lines]
