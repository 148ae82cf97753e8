"""What was expected of the tests, and what they came to, as a number. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from rollmill.models.base import Record
from rollmill_evaluator.test_grading.frameworks import Framework, Results, Status

ExitRule = Literal["explained", "zero", "ignored"]
"""``explained``: an exit code that only says "a test failed" is accepted where one did fail that was not expected to
pass; any other failure is a crash. ``zero``: only 0 is accepted. ``ignored``: the results alone count."""


class Expected(Record):
    """Tests that have to pass, by their whole names."""

    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.names:
            raise ValueError("name at least one test that has to pass")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return self.fail_to_pass + self.pass_to_pass


class Score(Record):
    """A test run as a number, with its parts."""

    value: float = Field(ge=0, le=1)
    components: dict[str, float]
    missing: tuple[str, ...] = ()
    """Expected tests that were not reported."""
    failing: tuple[str, ...] = ()
    """Expected tests that were reported and did not pass."""


@dataclass(frozen=True)
class Scoring:
    """How results become a number."""

    expected: Expected
    rule: Literal["all", "fraction"] = "all"
    exit_rule: ExitRule = "explained"

    def score(self, results: Results, exit_code: int | None, framework: Framework) -> Score:
        """The score of a run. A run whose exit is not accepted scores 0, whatever it reported before.

        Tests beyond the expected ones neither help nor harm. ``exit_code`` None: the run did not end by itself.
        """
        accepted = self._accepts(results, exit_code, framework)
        share = _share(results, self.expected.names)
        value = (share if self.rule == "fraction" else float(share == 1.0)) if accepted else 0.0
        return Score(
            value=value,
            components=self._components(results, accepted=accepted),
            missing=tuple(name for name in self.expected.names if name not in results),
            failing=tuple(
                name for name in self.expected.names if results.get(name, Status.PASSED) is not Status.PASSED
            ),
        )

    def _accepts(self, results: Results, exit_code: int | None, framework: Framework) -> bool:
        if exit_code is None:
            return False
        if exit_code == 0 or self.exit_rule == "ignored":
            return True
        failed = any(status is Status.FAILED for status in results.values())
        return self.exit_rule == "explained" and exit_code in framework.failing and failed

    def _components(self, results: Results, *, accepted: bool) -> dict[str, float]:
        parts = {"fail_to_pass": self.expected.fail_to_pass, "pass_to_pass": self.expected.pass_to_pass}
        shares = {part: _share(results, names) for part, names in parts.items() if names}
        return {**shares, "exit_accepted": float(accepted)}


def _share(results: Results, names: Sequence[str]) -> float:
    return sum(results.get(name) is Status.PASSED for name in names) / len(names)
