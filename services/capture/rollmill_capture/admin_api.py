"""Steering capture from outside: weight updates (RULES A12). Everything here needs the administrator's key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from rollmill.errors import InvalidInputError
from rollmill.models import PolicyVersion, is_identifier
from rollmill_capture.bodies import parse_object, read_body
from rollmill_capture.desk import SessionDesk
from rollmill_capture.opening import complaints
from rollmill_capture.pause import PauseMode, Pauses
from rollmill_capture.replies import RefusalError, json_response
from rollmill_capture.versions import Announced

M = TypeVar("M", bound=BaseModel)

ACCEPTED = 202
BODY_BYTES = 64 * 1024


class PauseRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: PauseMode = PauseMode.WAIT
    seconds: float = Field(default=60.0, ge=0)
    """How long to wait for the calls in flight, in mode ``wait``."""


class ResumeRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: PolicyVersion | None = None
    """What the engines have loaded: it labels calls from now on, before the topic ``policies`` says it. None: nothing
    new."""
    cache_reset: bool = False
    """The engines have dropped their prefix caches with the old weights."""


@dataclass(frozen=True)
class AdminApi:
    desk: SessionDesk
    pauses: Pauses
    announced: Announced

    async def pause(self, request: Request) -> Response:
        """New calls of the policy wait. 200: none is in flight, or they may go on; 202: some still are."""
        policy = self._policy(request)
        asked = _read(PauseRequest, await self._body(request))
        self.pauses.pause(policy, asked.mode)
        idle = asked.mode is not PauseMode.WAIT or await self.pauses.idle(policy, asked.seconds)
        return json_response(self._status(policy), 200 if idle else ACCEPTED)

    async def resume(self, request: Request) -> Response:
        """Calls go on, with the version that the engines have now."""
        policy = self._policy(request)
        asked = _read(ResumeRequest, await self._body(request))
        if asked.version is not None:
            self.announced.learn(policy, asked.version)
        if asked.cache_reset:
            self.announced.caches_reset(policy)
        self.pauses.resume(policy)
        return json_response(self._status(policy))

    async def status(self, request: Request) -> Response:
        return json_response(self._status(self._policy(request)))

    def _status(self, policy: str) -> dict[str, Any]:
        version = list(self.announced.newest(policy))
        stale = self.announced.caches_may_be_stale(policy)
        return {"policy": policy, "version": version, "kv_maybe_stale": stale, **self.pauses.status(policy)}

    def _policy(self, request: Request) -> str:
        self.desk.admin(request)
        policy: str = request.path_params["policy"]
        if not is_identifier(policy):
            raise RefusalError(404, f"{policy!r} is no name of a policy")
        return policy

    async def _body(self, request: Request) -> dict[str, Any]:
        try:
            return parse_object(await read_body(request, BODY_BYTES))
        except InvalidInputError as error:
            raise RefusalError(400, str(error)) from error


def _read(model: type[M], body: dict[str, Any]) -> M:
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise RefusalError(422, complaints(error, model)) from error
