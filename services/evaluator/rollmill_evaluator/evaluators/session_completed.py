"""The evaluator ``session_completed``."""

from __future__ import annotations

from rollmill.models import EvalResult, Trajectory, TrajectoryStatus
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, ResourceClass


class SessionCompletedEvaluator(BaseTrajectoryEvaluator):
    """1.0 where the session's status is COMPLETED, else 0.0."""

    resource_class = ResourceClass.LIGHT

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002  # it takes no time
        return EvalResult(outcome_reward=1.0 if trajectory.status is TrajectoryStatus.COMPLETED else 0.0)
