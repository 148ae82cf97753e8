"""The evaluator ``external``: somebody outside of the service grades."""

from __future__ import annotations

from rollmill.models import EvalResult, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, ResourceClass

EXTERNAL = "external"


class ExternalEvaluator(BaseTrajectoryEvaluator):
    """Graded by whoever produces to ``evaluations`` under the spec's name, a person for example. The service publishes
    nothing for it, and the session waits until its ``evaluation_seconds`` are over.
    """

    resource_class = ResourceClass.LIGHT
    answered_here = False

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002  # called as a part of a composite, which cannot wait for an outside grade
        return EvalResult(not_graded=EXTERNAL)
