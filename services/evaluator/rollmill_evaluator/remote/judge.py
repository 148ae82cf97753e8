"""The evaluator ``llm_judge``: a language model grades by a rubric."""

from __future__ import annotations

import math
from typing import Any

import orjson

from rollmill.errors import NotGradedError
from rollmill.models import EvalResult, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, ResourceClass
from rollmill_evaluator.remote.http_request import HttpRequest
from rollmill_evaluator.remote.judge_prompt import JudgeConfig, Opinion, UnreadableError, opinion, request

UNREADABLE = "judge_unreadable"
NEVER_TRAINED = {"x-rollmill-call": "aux"}
"""Capture, if the judge is reached through one, records the call and trains nothing of it."""
SHOWN = 300


class LlmJudgeEvaluator(BaseTrajectoryEvaluator):
    """Asks a model behind an OpenAI-compatible API for a score, by a JSON schema.

    Constructed with the fields of `JudgeConfig`; raises ValueError for a config that is none. An answer that cannot be
    read, or a score outside of the range, is asked for again, ``attempts`` times in all, and is then not graded
    (``judge_unreadable``); it is never cut to the range.
    """

    version = "1"
    resource_class = ResourceClass.REMOTE

    def __init__(self, **config: Any) -> None:
        self._config = JudgeConfig.model_validate(config)

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:
        config = self._config
        body, cut = request(config, trajectory)
        question = HttpRequest(
            service=config.find(context), body=orjson.dumps(body), path="/chat/completions", headers=NEVER_TRAINED
        )
        complaints: list[str] = []
        for _ in range(config.attempts):
            answer = await question.ask(min(config.timeout_seconds, context.deadline_seconds))
            try:
                return _result(config, opinion(config, answer), tries=len(complaints) + 1, cut=cut)
            except UnreadableError as error:
                complaints.append(str(error)[:SHOWN])
        raise NotGradedError(UNREADABLE, f"{config.attempts} answers could not be read; the last: {complaints[-1]}")


def _result(config: JudgeConfig, said: Opinion, *, tries: int, cut: int) -> EvalResult:
    metadata = {
        "model": config.model,
        "reason": said.reason,
        "usage": said.usage,
        "tries": tries,
        "characters_cut": cut,
    }
    if not config.criteria:
        return EvalResult(outcome_reward=said.scores["score"], metadata=metadata)
    total = math.fsum(config.criteria.values())
    outcome = math.fsum(weight / total * said.scores[name] for name, weight in config.criteria.items())
    return EvalResult(outcome_reward=outcome, components=said.scores, metadata=metadata)
