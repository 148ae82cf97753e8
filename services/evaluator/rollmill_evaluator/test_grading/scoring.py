"""Grades: test results against the expected ones, and runs that ended before their tests did. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollmill.errors import InfrastructureError
from rollmill.models import EvalResult, Verdict
from rollmill.models.base import FiniteFloat, Record
from rollmill.strategies.sandbox import SANDBOX_FAILED, Ending, Job, JobOutcome
from rollmill_evaluator.test_grading.frameworks import Framework, Results, Status
from rollmill_evaluator.test_grading.workspace import APPLY, WORKTREE

OUTPUT_CHARACTERS = 4000
"""Characters of an output that are kept in an evaluation."""

ExitRule = Literal["explained", "zero", "ignored"]
"""``explained``: an exit code that means no more than "a test failed" is accepted where a failed test was reported; any
other non-zero code is a crash. ``zero``: only 0 is accepted. ``ignored``: the results alone count."""


class ExpectedTests(Record):
    """Tests that have to pass, by their full names."""

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

    expected: ExpectedTests
    rule: Literal["all", "fraction"] = "all"
    exit_rule: ExitRule = "explained"

    def score(self, results: Results, exit_code: int | None, framework: Framework) -> Score:
        """The score of a run. Where its exit code is not accepted it is 0, whatever was reported before.

        Tests that are not expected do not change the score. ``exit_code`` None: the run did not end by itself.
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


class VerdictRewards(Record):
    """The reward of each verdict that the session itself caused; None: not graded, with the verdict as the reason."""

    failed_to_apply: FiniteFloat | None = 0.0
    empty_patch: FiniteFloat | None = 0.0
    timed_out: FiniteFloat | None = 0.0

    def of(self, verdict: Verdict) -> float | None:
        reward: float | None = getattr(self, verdict.value)
        return reward


def session_failure(verdict: Verdict, rewards: VerdictRewards, metadata: dict[str, Any]) -> EvalResult:
    """A verdict that the session itself caused, with the reward that the config gives it, or with none."""
    reward = rewards.of(verdict)
    reason = verdict.value if reward is None else None
    return EvalResult(outcome_reward=reward, not_graded=reason, verdict=verdict, metadata=metadata)


def premature_end(job: Job, outcome: JobOutcome, rewards: VerdictRewards) -> EvalResult | None:
    """The grade of a job in which the tests never ran or were timed out; None: their results are to be scored.

    Raises InfrastructureError where the work tree could not be made.
    """
    failed = next((step for step in outcome.steps[: len(job.steps) - 1] if step.exit_code), None)
    if failed is not None and failed.name == APPLY:
        return session_failure(Verdict.FAILED_TO_APPLY, rewards, {"output": failed.output[-OUTPUT_CHARACTERS:]})
    if failed is not None:
        raise InfrastructureError(WORKTREE, f"{failed.name}: {failed.output[-OUTPUT_CHARACTERS:]}")
    if len(outcome.steps) < len(job.steps) - 1:
        unfinished = job.steps[len(outcome.steps)].name
        raise InfrastructureError(SANDBOX_FAILED, f"{unfinished}: {outcome.ending} after {outcome.seconds:.1f} s")
    if outcome.ending is Ending.TIMED_OUT:
        output = outcome.output.text[-OUTPUT_CHARACTERS:]
        return session_failure(Verdict.TIMED_OUT, rewards, {"seconds": job.limits.seconds, "output": output})
    return None
