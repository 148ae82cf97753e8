"""The evaluator ``external``: somebody else's word is awaited."""

from __future__ import annotations

from rollmill.models import EvalResult, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, ResourceClass

EXTERNAL = "external"


class ExternalEvaluator(BaseTrajectoryEvaluator):
    """Graded by whoever produces to ``evaluations`` under the spec's name, a person for example; the service leaves it
    to them, and the session waits for it until its ``evaluation_seconds`` are over.
    """

    resource_class = ResourceClass.LIGHT
    answered_here = False

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002  # as a part of something else there is nobody to wait for
        return EvalResult(not_graded=EXTERNAL)
