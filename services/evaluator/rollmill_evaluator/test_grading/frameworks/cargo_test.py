"""Rust: ``cargo test``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rollmill_evaluator.test_grading.frameworks.results import Results, Status, clean_lines, worst_statuses

BINARY = re.compile(r"^ *(?:Running (?:unittests )?(?P<path>\S+) \(|Doc-tests (?P<crate>\S+))")
POINT = re.compile(r"^test (?P<name>.+?)(?: - should panic)? \.\.\. (?P<status>ok|FAILED|ignored)")
STATUSES = {"ok": Status.PASSED, "FAILED": Status.FAILED, "ignored": Status.SKIPPED}


def read(text: str, _report: bytes | None) -> Results:
    """Names as ``src/lib.rs::module::test``, after the binary's source; ``doc crate::…`` for tests in documentation."""
    return worst_statuses(_found(clean_lines(text)))


def _found(lines: list[str]) -> Iterator[tuple[str, Status]]:
    binary = ""
    for line in lines:
        if named := BINARY.match(line):
            binary = named["path"] or f"doc {named['crate']}"
        elif point := POINT.match(line):
            yield f"{binary}::{point['name']}", STATUSES[point["status"]]
