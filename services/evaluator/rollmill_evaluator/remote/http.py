"""The evaluator ``http``: an external reward service."""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import Field

from rollmill.errors import NotGradedError
from rollmill.models import EvalResult, Trajectory
from rollmill.strategies import BaseTrajectoryEvaluator, EvaluationContext
from rollmill.strategies.services import ResourceClass
from rollmill_evaluator.remote.http_request import INVALID_ANSWER, HttpRequest, ServiceReference
from rollmill_evaluator.remote.request_payload import SessionPart, request_payload

SESSION = "x-rollmill-session"


class HttpConfig(ServiceReference):
    include: tuple[SessionPart, ...] = (SessionPart.OUTPUT, SessionPart.METADATA)
    """Parts of the session that are sent."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Sent unchanged, for the service."""
    signed_answer: bool = False
    """True: an answer is accepted only with a signature by the service's ``signing_key``."""


class HttpEvaluator(BaseTrajectoryEvaluator):
    """POSTs a session's result; the answer, the fields of an `EvalResult` as JSON, is its grade.

    Constructed with the fields of `HttpConfig`; raises ValueError for an invalid config. Server errors, timeouts and
    408, 425 and 429 are infrastructure failures: tried again, then the reason. Any other refusal is the reason at once,
    and so is an answer that is not a valid result (NaN is not).
    """

    version = "1"
    resource_class = ResourceClass.REMOTE

    def __init__(self, **config: Any) -> None:
        self._config = HttpConfig.validate_strictly(config)

    async def evaluate(self, trajectory: Trajectory, context: EvaluationContext) -> EvalResult:
        config = self._config
        payload = {**request_payload(trajectory, config.include), "parameters": config.parameters}
        request = HttpRequest(
            service=config.resolve(context),
            body=orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY),
            headers={SESSION: f"{trajectory.session_id}:{trajectory.attempt}"},
            signed_answer=config.signed_answer,
            rule=config.address_rule(context),
        )
        return parse_result(await request.send(min(config.timeout_seconds, context.deadline_seconds)))


def parse_result(body: bytes) -> EvalResult:
    """Raises NotGradedError (``invalid_answer``)."""
    try:
        return EvalResult.validate_strictly(orjson.loads(body))
    except ValueError as error:
        raise NotGradedError(INVALID_ANSWER, str(error)) from error
