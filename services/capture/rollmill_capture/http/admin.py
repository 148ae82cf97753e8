"""Steering capture from outside: weight updates (rule A12). Everything here needs the administrator's key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from rollmill.codec import JSON, encode
from rollmill.errors import BackpressureError, InvalidInputError
from rollmill.models import PauseMode, PolicyPause, PolicyVersion, is_identifier
from rollmill.topics import SESSIONS
from rollmill_capture.bodies import parse_object, read_body
from rollmill_capture.coordination.membership import Membership
from rollmill_capture.coordination.policies import PolicyPauses
from rollmill_capture.errors import ApiError, json_response
from rollmill_capture.event_log.event_writer import EventWriter, NotAcknowledgedError
from rollmill_capture.http.requests import SessionResolver
from rollmill_capture.http.session_requests import validation_message

M = TypeVar("M", bound=BaseModel)

ACCEPTED = 202
BODY_BYTES = 64 * 1024


class PauseRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: PauseMode = Field(
        default=PauseMode.WAIT,
        description="What becomes of the calls in flight. `wait`: the pause is complete when they have ended. `keep`: "
        "they go on while the weights change. `abort_resume`: the engine aborts them, and capture continues them.",
    )
    seconds: float = Field(
        default=60.0,
        ge=0,
        description="Seconds to wait for all replicas, and in mode `wait` for the calls in flight.",
    )


class ResumeRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: PolicyVersion | None = Field(
        default=None,
        description="The version that the engines have loaded, as [epoch, version]: it labels calls from now on. null: "
        "no new one.",
    )
    cache_reset: bool = Field(
        default=False, description="The engines have dropped their prefix caches together with the old weights."
    )


@dataclass(frozen=True)
class AdminApi:
    resolver: SessionResolver
    pauses: PolicyPauses
    membership: Membership
    event_writer: EventWriter

    async def pause(self, request: Request) -> Response:
        """New calls of the policy wait, at all replicas. 200: all of them know it, and no call is in flight, or those
        may go on; 202: some replica is not done.
        """
        policy = self._policy(request)
        body = _read(PauseRequest, await self._body(request))
        await self.resolver.catch_up()  # so that this pause comes after those of other replicas
        pause = self.pauses.next(policy, body.mode)
        await self._write(pause)
        reached = await self.membership.wait_reached(pause, body.seconds)
        return json_response(self._status(policy, pause), 200 if reached else ACCEPTED)

    async def resume(self, request: Request) -> Response:
        """Calls go on, at all replicas, with the version that the engines have now."""
        policy = self._policy(request)
        body = _read(ResumeRequest, await self._body(request))
        await self.resolver.catch_up()  # so that this pause comes after those of other replicas
        await self._write(self.pauses.next(policy, None, body.version, cache_reset=body.cache_reset))
        return json_response(self._status(policy))

    async def status(self, request: Request) -> Response:
        return json_response(self._status(self._policy(request)))

    async def _write(self, pause: PolicyPause) -> None:
        """Here it applies at once, whatever becomes of Kafka."""
        self.pauses.apply(pause)
        value = encode(pause, JSON)
        try:
            with self.event_writer.reserve_space(len(value)):
                await self.event_writer.append(SESSIONS, pause.key, value)
        except (NotAcknowledgedError, BackpressureError) as error:
            raise ApiError(503, f"other replicas may not know of it: {error}; ask again", retry=True) from error

    def _status(self, policy: str, pause: PolicyPause | None = None) -> dict[str, Any]:
        """``in_flight`` and ``waiting`` count the calls of this replica."""
        announced = self.pauses.announced
        awaited = {} if pause is None else {"replicas_awaited": self.membership.awaited(pause)}
        return {
            "policy": policy,
            "version": list(announced.newest(policy)),
            "kv_maybe_stale": announced.caches_may_be_stale(policy),
            **self.pauses.local.status(policy),
            **awaited,
        }

    def _policy(self, request: Request) -> str:
        self.resolver.require_admin(request)
        policy: str = request.path_params["policy"]
        if not is_identifier(policy):
            raise ApiError(404, f"{policy!r} is no name of a policy")
        return policy

    async def _body(self, request: Request) -> dict[str, Any]:
        try:
            return parse_object(await read_body(request, BODY_BYTES))
        except InvalidInputError as error:
            raise ApiError(400, str(error)) from error


def _read(model: type[M], body: dict[str, Any]) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise ApiError(422, validation_message(error, model)) from error
