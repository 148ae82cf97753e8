"""The evaluator ``reported``."""

from __future__ import annotations

from rollmill.models import EvalResult, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, ResourceClass

NOT_REPORTED = "not_reported"


class ReportedEvaluator(BaseTrajectoryEvaluator):
    """The reward that the caller gave when it closed the session; not graded (``not_reported``) where it gave none."""

    resource_class = ResourceClass.LIGHT

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002  # it takes no time
        if trajectory.reported_reward is None:
            return EvalResult(not_graded=NOT_REPORTED)
        return EvalResult(outcome_reward=trajectory.reported_reward)
