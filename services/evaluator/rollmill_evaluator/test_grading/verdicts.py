"""What a job came to, as a verdict. Pure."""

from __future__ import annotations

from typing import Any

from rollmill.errors import InfrastructureError
from rollmill.models import EvalResult, Verdict
from rollmill.strategies.sandbox import SANDBOX_FAILED, Ending, Job, JobOutcome
from rollmill_evaluator.test_grading.config import Rewards
from rollmill_evaluator.test_grading.workspace import WORKTREE

SHOWN = 4000
"""Characters of an output that travel with an evaluation."""
APPLY = "apply"


def own_doing(verdict: Verdict, rewards: Rewards, metadata: dict[str, Any]) -> EvalResult:
    """A verdict that is the session's own doing, with the reward that the config gives it, or with none."""
    reward = rewards.of(verdict)
    reason = verdict.value if reward is None else None
    return EvalResult(outcome_reward=reward, not_graded=reason, verdict=verdict, metadata=metadata)


def unfit(job: Job, outcome: JobOutcome, rewards: Rewards) -> EvalResult | None:
    """The verdict of a job whose tests did not run to an end; None: they did, or what ended them was their own.

    Raises InfrastructureError where the work tree could not be made.
    """
    failed = next((step for step in outcome.steps[: len(job.steps) - 1] if step.exit_code), None)
    if failed is not None and failed.name == APPLY:
        return own_doing(Verdict.FAILED_TO_APPLY, rewards, {"output": failed.output[-SHOWN:]})
    if failed is not None:
        raise InfrastructureError(WORKTREE, f"{failed.name}: {failed.output[-SHOWN:]}")
    if len(outcome.steps) < len(job.steps) - 1:
        stuck = job.steps[len(outcome.steps)].name
        raise InfrastructureError(SANDBOX_FAILED, f"{stuck}: {outcome.ending} after {outcome.seconds:.1f} s")
    if outcome.ending is Ending.TIMED_OUT:
        return own_doing(
            Verdict.TIMED_OUT, rewards, {"seconds": job.limits.seconds, "output": outcome.output.text[-SHOWN:]}
        )
    return None
