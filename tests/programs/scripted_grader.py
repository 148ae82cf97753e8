"""An evaluator of one's own, as a user would write it: takes its time, and sometimes what it stands on fails."""

from __future__ import annotations

import asyncio

from rollmill.errors import InfrastructureError
from rollmill.models import EvalResult, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext


class ScriptedGrader(BaseTrajectoryEvaluator):
    """``fault``: on every try its machine is lost, before it took any time."""

    def __init__(self, *, seconds: float, reward: float, fault: bool = False) -> None:
        self._seconds, self._reward, self._fault = seconds, reward, fault

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002  # the base's signature
        if self._fault:
            raise InfrastructureError("machine_lost", "the machine with the tests is gone")
        await asyncio.sleep(self._seconds)
        return EvalResult(outcome_reward=self._reward)
