"""The evaluator ``http``: an external reward service."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import Field

from rollmill.errors import NotGradedError
from rollmill.models import EvalResult, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext
from rollmill.strategies.services import ResourceClass
from rollmill_evaluator.remote.http_request import INVALID_ANSWER, Address, HttpRequest
from rollmill_evaluator.remote.request_payload import Part, request_payload

SESSION = "x-rollmill-session"


class HttpConfig(Address):
    include: tuple[Part, ...] = (Part.OUTPUT, Part.METADATA)
    """What of the session is sent."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Sent as they are, for the service."""
    signed_answer: bool = False
    """True: an answer counts only with the signature of the service's ``signing_key``."""


class HttpEvaluator(BaseTrajectoryEvaluator):
    """POSTs what a session came to, and takes the answer, the fields of an `EvalResult` as JSON, for its grade.

    Constructed with the fields of `HttpConfig`; raises ValueError for a config that is none. Server errors, timeouts
    and 408, 425 and 429 are infrastructure, tried again and then named; any other refusal is named at once, and so is
    an answer that is no result (NaN is none).
    """

    version = "1"
    resource_class = ResourceClass.REMOTE

    def __init__(self, **config: Any) -> None:
        self._config = HttpConfig.model_validate(config)

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:
        config = self._config
        told = {**request_payload(trajectory, config.include), "parameters": config.parameters}
        question = HttpRequest(
            service=config.find(context),
            body=orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY),
            headers={SESSION: f"{trajectory.session_id}:{trajectory.attempt}"},
            signed_answer=config.signed_answer,
        )
        return read(await question.ask(min(config.timeout_seconds, context.deadline_seconds)))


def read(body: bytes) -> EvalResult:
    """Raises NotGradedError (``invalid_answer``)."""
    try:
        return EvalResult.model_validate(orjson.loads(body))
    except ValueError as error:
        raise NotGradedError(INVALID_ANSWER, str(error)) from error
