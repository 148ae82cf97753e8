"""The evaluator ``llm_judge``: a language model grades by a rubric."""

from __future__ import annotations

import math
from typing import Any

import orjson

from rollmill.errors import NotGradedError
from rollmill.models import EvalResult, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext, ResourceClass
from rollmill_evaluator.remote.http_request import HttpRequest
from rollmill_evaluator.remote.judge_prompt import JudgeConfig, JudgeScores, UnreadableError, chat_request, parse_scores

UNREADABLE = "judge_unreadable"
NEVER_TRAINED = {"x-rollmill-call": "aux"}
"""If the judge is reached through a capture, that records the call, and none of its tokens are trained."""
COMPLAINT_CHARACTERS = 300


class LlmJudgeEvaluator(BaseTrajectoryEvaluator):
    """Asks a model behind an OpenAI-compatible API for a score, by a JSON schema.

    Constructed with the fields of `JudgeConfig`; raises ValueError for an invalid config. Where an answer cannot be
    parsed, or a score is outside of the range, the request is sent again, ``attempts`` times in all; then the session
    is not graded (``judge_unreadable``). A score is never clipped to the range.
    """

    version = "1"
    resource_class = ResourceClass.REMOTE

    def __init__(self, **config: Any) -> None:
        self._config = JudgeConfig.validate_strictly(config)

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:
        config = self._config
        body, cut = chat_request(config, trajectory)
        request = HttpRequest(
            service=config.resolve(context),
            body=orjson.dumps(body),
            path="/chat/completions",
            headers=NEVER_TRAINED,
            rule=config.address_rule(context),
        )
        errors: list[str] = []
        for _ in range(config.attempts):
            answer = await request.send(min(config.timeout_seconds, context.deadline_seconds))
            try:
                return _result(config, parse_scores(config, answer), tries=len(errors) + 1, cut=cut)
            except UnreadableError as error:
                errors.append(str(error)[:COMPLAINT_CHARACTERS])
        raise NotGradedError(UNREADABLE, f"{config.attempts} answers could not be parsed; the last: {errors[-1]}")


def _result(config: JudgeConfig, answer: JudgeScores, *, tries: int, cut: int) -> EvalResult:
    metadata = {
        "model": config.model,
        "reason": answer.reason,
        "usage": answer.usage,
        "tries": tries,
        "characters_cut": cut,
    }
    if not config.criteria:
        return EvalResult(outcome_reward=answer.scores["score"], metadata=metadata)
    total = math.fsum(config.criteria.values())
    outcome = math.fsum(weight / total * answer.scores[name] for name, weight in config.criteria.items())
    return EvalResult(outcome_reward=outcome, components=answer.scores, metadata=metadata)
