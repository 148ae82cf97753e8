"""Frameworks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rollmill_evaluator.test_grading.frameworks import (
    cargo_test,
    go_test,
    jest,
    junit,
    pytest_output,
    tap,
    unittest_output,
)
from rollmill_evaluator.test_grading.frameworks.results import Results

FrameworkName = Literal["pytest", "unittest", "junit", "tap", "go", "cargo", "jest"]


@dataclass(frozen=True)
class Framework:
    """How to read one framework's results."""

    read: Callable[[str, bytes | None], Results]
    """Takes what was printed, and the report file where there is one."""
    failing: frozenset[int] = frozenset({1})
    """Exit codes that say no more than that some test failed."""
    report: bool = False
    """True: results are in a file, not in what is printed."""


FRAMEWORKS: Mapping[FrameworkName, Framework] = {
    "pytest": Framework(pytest_output.read),
    "unittest": Framework(unittest_output.read),
    "junit": Framework(junit.read, report=True),
    "tap": Framework(tap.read, failing=frozenset(range(1, 126))),
    "go": Framework(go_test.read),
    "cargo": Framework(cargo_test.read, failing=frozenset({101})),
    "jest": Framework(jest.read, report=True),
}
