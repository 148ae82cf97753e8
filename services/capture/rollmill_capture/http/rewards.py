"""Rewards from people and harnesses: `POST /v1/sessions/{id}/reward` appends an evaluation, as any grader may."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, PositiveInt, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from rollmill.codec import JSON, encode
from rollmill.errors import BackpressureError, InvalidInputError
from rollmill.models import LARGEST_REWARD, EvalResult, Evaluation, Identifier, SessionEntry, dump_json
from rollmill.runtime.telemetry.clock import Clock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import EVALUATIONS
from rollmill_capture.bodies import parse_object, read_body
from rollmill_capture.errors import ApiError, json_response
from rollmill_capture.event_log.event_writer import EventWriter, NotAcknowledgedError
from rollmill_capture.http.requests import SessionResolver
from rollmill_capture.http.session_requests import refuse_large_rewards, validation_message

ACCEPTED = 202
UNPROCESSABLE = 422
HEADROOM = 4096
"""Bytes of a record beside the caller's fields."""
MOST_EVALUATIONS = 256
"""Of one session's attempt, as many as the reward-merger takes."""
MOST_REMEMBERED = 100_000
"""Evaluations that are remembered, of all sessions."""
_IDENTITY = (
    *("evaluator", "supersedes", "outcome_reward", "trace_rewards", "turn_rewards", "token_rewards"),
    *("not_graded", "components"),
)
"""The fields that two evaluations of one id have to agree in, as the reward-merger compares them."""


class RewardRequest(EvalResult):
    """What a caller sends: the fields of an `EvalResult`, ``reward`` short for ``outcome_reward``, and the grader."""

    evaluator: Identifier = Field(
        default="human", description="The evaluator of the session that this reward is from, or any name."
    )
    evaluation_id: Identifier | None = Field(
        default=None,
        description="Id of this reward. Without it: made from the content, so that a repeated request changes nothing.",
    )
    supersedes: Identifier | None = Field(default=None, description="`evaluation_id` of the reward that this revises.")
    attempt: PositiveInt | None = Field(default=None, description="Attempt of the session. Without it: the newest.")
    version: str | None = Field(default=None, description="Version of the grader, kept with the reward.")


class RewardHistory:
    """What this replica was sent, so that it can refuse what the reward-merger would only make a dead letter of."""

    def __init__(self, max_evaluations: int = MOST_REMEMBERED) -> None:
        self._sessions: OrderedDict[tuple[str, int], dict[str, bytes]] = OrderedDict()
        """Session and attempt, the one that was rewarded last at the end, to its evaluations' digests."""
        self._max_evaluations = max_evaluations
        self._evaluations = 0

    def add(self, evaluation: Evaluation, quota: int | None) -> bool:
        """Whether it is news. Raises ApiError (409, 429)."""
        known = self._sessions.setdefault((evaluation.session_id, evaluation.attempt), {})
        self._sessions.move_to_end((evaluation.session_id, evaluation.attempt))
        digest, before = _content_digest(evaluation), known.get(evaluation.evaluation_id)
        if before is not None and before != digest:
            raise ApiError(
                409,
                f"evaluation_id {evaluation.evaluation_id!r} was used before, with another content: a revised reward "
                "needs an id of its own, with `supersedes`",
            )
        if before is None:
            _refuse_too_many(len(known), quota)
            known[evaluation.evaluation_id] = digest
            self._evaluations += 1
            self._forget()
        return before is None

    def withdraw(self, evaluation: Evaluation) -> None:
        """It was not written."""
        known = self._sessions.get((evaluation.session_id, evaluation.attempt), {})
        if known.pop(evaluation.evaluation_id, None) is not None:
            self._evaluations -= 1

    def _forget(self) -> None:
        while self._evaluations > self._max_evaluations:
            _, known = self._sessions.popitem(last=False)
            self._evaluations -= len(known)


@dataclass(frozen=True)
class RewardApi:
    resolver: SessionResolver
    event_writer: EventWriter
    clock: Clock
    metrics: Metrics
    max_reward: float = LARGEST_REWARD
    quota: int | None = None
    """Rewards of one attempt of a session; None: as many as the reward-merger takes."""
    history: RewardHistory = field(default_factory=RewardHistory)

    async def reward(self, request: Request) -> Response:
        """Of an open or a closed session. Where keys are required, the tenant's own is needed: the agent that is graded
        knows its session's token.
        """
        entry = await self.resolver.tenants_session(request)
        evaluation = self._evaluation(entry, await self._read(request))
        await self._append(evaluation, is_new=self.history.add(evaluation, self.quota))
        self.metrics.count("rewards", evaluator=evaluation.evaluator)
        fields = {name: getattr(evaluation, name) for name in ("attempt", "evaluation_id", "evaluator")}
        return json_response({"session_id": self.resolver.name_of(entry), **fields}, ACCEPTED)

    async def _read(self, request: Request) -> RewardRequest:
        try:
            body = parse_object(await read_body(request, EVALUATIONS.max_bytes - HEADROOM))
            found = RewardRequest.validate_strictly(_with_full_name(body))
            refuse_large_rewards(_rewards_of(found), self.max_reward)
        except ValidationError as error:
            raise ApiError(UNPROCESSABLE, validation_message(error, RewardRequest)) from error
        except InvalidInputError as error:
            raise ApiError(UNPROCESSABLE, str(error)) from error
        return found

    def _evaluation(self, entry: SessionEntry, request: RewardRequest) -> Evaluation:
        attempt = request.attempt or entry.attempt
        if attempt > entry.attempt:
            raise ApiError(
                409, f"session {self.resolver.name_of(entry)!r} is at attempt {entry.attempt}, not {attempt}"
            )
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

    async def _append(self, evaluation: Evaluation, *, is_new: bool) -> None:
        value = encode(evaluation, JSON)
        if len(value) > EVALUATIONS.max_bytes:
            self.history.withdraw(evaluation)
            raise ApiError(413, f"the evaluation is over {EVALUATIONS.max_bytes} bytes")
        try:
            with self.event_writer.reserve_space(len(value)):
                await self.event_writer.append(EVALUATIONS, evaluation.session_id, value)
        except NotAcknowledgedError as error:
            raise ApiError(503, f"{error}; ask again", retry=True) from error
        except BackpressureError as error:
            if is_new:
                self.history.withdraw(evaluation)
            raise ApiError(503, str(error), retry=True, retry_after=error.retry_after) from error


def _rewards_of(result: EvalResult) -> Iterator[float | None]:
    yield result.outcome_reward
    yield from result.trace_rewards or ()
    for rewards in (*(result.turn_rewards or ()), *(result.token_rewards or ())):
        yield from rewards or ()


def _content_digest(evaluation: Evaluation) -> bytes:
    content = dump_json([getattr(evaluation, name) for name in _IDENTITY])
    return hashlib.blake2b(content, digest_size=8).digest()


def _refuse_too_many(known: int, quota: int | None) -> None:
    if quota is not None and known >= quota:
        raise ApiError(429, f"the session's quota is exhausted: {quota} rewards (ROLLMILL_SESSION_REWARDS)")
    if known >= MOST_EVALUATIONS:
        raise ApiError(409, f"the session has {known} rewards already, as many as one may have")


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
