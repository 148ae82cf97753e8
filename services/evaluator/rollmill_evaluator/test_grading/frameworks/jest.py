"""Jest and vitest: the file that ``--json --outputFile`` (``--reporter=json``) writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from rollmill.strategies.sandbox import WORK
from rollmill_evaluator.test_grading.frameworks.results import Results, Status, worst_statuses

STATUSES = {"passed": Status.PASSED, "failed": Status.FAILED}


def read(_text: str, report: bytes | None) -> Results:
    """Names as ``src/a.test.js::full name``. No report, or a broken one, has no results."""
    try:
        found = orjson.loads(report or b"")
        return worst_statuses(_found(found))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return {}


def _found(report: dict[str, Any]) -> Iterator[tuple[str, Status]]:
    for suite in report["testResults"]:
        path = str(suite["name"]).removeprefix(f"{WORK}/")
        for test in suite["assertionResults"]:
            yield f"{path}::{test['fullName']}", STATUSES.get(test["status"], Status.SKIPPED)
