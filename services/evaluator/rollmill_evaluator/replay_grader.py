"""Grading for ``rollmill replay``: registered as an entry point of the group ``rollmill.graders``."""

from __future__ import annotations

from dataclasses import dataclass

from rollmill.models import Evaluation, EvaluatorSpec, Trajectory
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.strategies import EvaluationContext, evaluator_registry
from rollmill_evaluator.grading import Grader, encode_evaluation
from rollmill_evaluator.settings import EvaluatorSettings


@dataclass(frozen=True)
class ReplayGrader:
    """The service's grader without its consumer. Implements `rollmill.ops.replay.stages.ReplayGrader`."""

    grader: Grader
    concurrency: int

    async def grade(self, trajectory: Trajectory, digest: str, spec: EvaluatorSpec) -> Evaluation:
        return await self.grader.grade(trajectory, digest, spec)

    def encode(self, evaluation: Evaluation, limit: int) -> bytes:
        return encode_evaluation(evaluation, limit)


def replay_grader(settings: EvaluatorSettings) -> ReplayGrader:
    networks = tuple(map(str, settings.evaluator_networks))
    context = EvaluationContext(deadline_seconds=0.0, any_url=settings.evaluator_any_url, networks=networks)
    grader = Grader(evaluator_registry(), settings.limits, SystemClock(), context, settings.spec_maxima)
    return ReplayGrader(grader, settings.evaluator_concurrency)
