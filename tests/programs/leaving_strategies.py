"""Strategies that call ``sys.exit()`` wherever they are called, as a script that was never meant as a library does."""

from __future__ import annotations

import asyncio
import sys

from rollmill.models import CompletionSession, EvalResult, Trajectory
from rollmill.strategies import BaseTrajectoryBuilder, BaseTrajectoryEvaluator, EvaluationContext


class LeavingBuilder(BaseTrajectoryBuilder):
    def build(self, session: CompletionSession) -> Trajectory:  # noqa: ARG002  # the base's signature
        sys.exit()


class LeavingEvaluator(BaseTrajectoryEvaluator):
    """``at``: constructed, evaluated, or in a task that it starts."""

    def __init__(self, at: str) -> None:
        self._at = at
        if at == "init":
            sys.exit()

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:  # noqa: ARG002
        if self._at == "task":
            await asyncio.create_task(_leave())
        sys.exit()


async def _leave() -> None:
    sys.exit()
