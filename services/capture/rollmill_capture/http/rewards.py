"""Rewards from people and harnesses: `POST /v1/sessions/{id}/reward` appends an evaluation, as any grader may."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from pydantic import PositiveInt, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from rollmill.codec import JSON, encode
from rollmill.errors import BackpressureError, InvalidInputError
from rollmill.models import EvalResult, Evaluation, Identifier, SessionEntry, dump_json
from rollmill.runtime.telemetry.clock import Clock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import EVALUATIONS
from rollmill_capture.errors import ApiError, json_response
from rollmill_capture.event_log.event_writer import EventWriter, NotAcknowledgedError
from rollmill_capture.http.requests import SessionResolver, parse_object, read_body
from rollmill_capture.http.session_requests import validation_message

ACCEPTED = 202
UNPROCESSABLE = 422
HEADROOM = 4096
"""Bytes of a record beside the caller's fields."""


class RewardRequest(EvalResult):
    """What a caller sends: the fields of an `EvalResult`, ``reward`` short for ``outcome_reward``, and the grader."""

    evaluator: Identifier = "human"
    """The evaluator of the session's spec that this answers, or any name."""
    evaluation_id: Identifier | None = None
    """None: made from the content, so that the same request again changes nothing."""
    supersedes: Identifier | None = None
    """The evaluation that this one revises."""
    attempt: PositiveInt | None = None
    """None: the session's newest."""
    version: str | None = None


@dataclass(frozen=True)
class RewardApi:
    resolver: SessionResolver
    event_writer: EventWriter
    clock: Clock
    metrics: Metrics

    async def reward(self, request: Request) -> Response:
        """Of an open or a closed session. Where keys are required, the tenant's own is needed: the agent that is graded
        knows its session's token.
        """
        self.resolver.tenant_of(request)
        entry = await self.resolver.owned_session(request, request.path_params["session_id"])
        evaluation = self._evaluation(entry, await self._read(request))
        await self._append(evaluation)
        self.metrics.count("rewards", evaluator=evaluation.evaluator)
        names = ("session_id", "attempt", "evaluation_id", "evaluator")
        return json_response({name: getattr(evaluation, name) for name in names}, ACCEPTED)

    async def _read(self, request: Request) -> RewardRequest:
        try:
            body = parse_object(await read_body(request, EVALUATIONS.max_bytes - HEADROOM))
            return RewardRequest.validate_strictly(_with_full_name(body))
        except ValidationError as error:
            raise ApiError(UNPROCESSABLE, validation_message(error, RewardRequest)) from error
        except InvalidInputError as error:
            raise ApiError(UNPROCESSABLE, str(error)) from error

    def _evaluation(self, entry: SessionEntry, request: RewardRequest) -> Evaluation:
        attempt = request.attempt or entry.attempt
        if attempt > entry.attempt:
            raise ApiError(409, f"session {entry.session_id!r} is at attempt {entry.attempt}, not {attempt}")
        if not request.has_reward and request.not_graded is None:
            raise ApiError(UNPROCESSABLE, "give a `reward`, or say why there is none in `not_graded`")
        fields = {
            name: getattr(request, name) for name in (*EvalResult.model_fields, "evaluator", "supersedes", "version")
        }
        return Evaluation(
            **fields,
            evaluation_id=request.evaluation_id or _evaluation_id(entry, attempt, fields),
            session_id=entry.session_id,
            attempt=attempt,
            at=self.clock.now(),
        )

    async def _append(self, evaluation: Evaluation) -> None:
        value = encode(evaluation, JSON)
        if len(value) > EVALUATIONS.max_bytes:
            raise ApiError(413, f"the evaluation is over {EVALUATIONS.max_bytes} bytes")
        try:
            with self.event_writer.reserve_space(len(value)):
                await self.event_writer.append(EVALUATIONS, evaluation.session_id, value)
        except NotAcknowledgedError as error:
            raise ApiError(503, f"{error}; ask again", retry=True) from error
        except BackpressureError as error:
            raise ApiError(503, str(error), retry=True, retry_after=error.retry_after) from error


def _with_full_name(body: dict[str, Any]) -> dict[str, Any]:
    """With ``reward`` under its full name. Raises InvalidInputError where both are given."""
    if "reward" not in body:
        return body
    if "outcome_reward" in body:
        raise InvalidInputError("`reward` is short for `outcome_reward`: give one of them")
    return {**{name: value for name, value in body.items() if name != "reward"}, "outcome_reward": body["reward"]}


def _evaluation_id(entry: SessionEntry, attempt: int, fields: dict[str, Any]) -> str:
    content = dump_json([entry.session_id, attempt, {name: str(value) for name, value in fields.items()}])
    return f"said-{hashlib.blake2b(content, digest_size=12).hexdigest()}"
