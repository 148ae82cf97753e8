"""The sessions' API: open, show, close. Each answer comes after Kafka's acknowledgement."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from rollmill.codec import JSON, encode
from rollmill.errors import BackpressureError, InvalidInputError
from rollmill.models import LARGEST_REWARD, SessionClosed, SessionEntry, SessionOpened, SessionSpec, SessionState
from rollmill.models.session import TENANT
from rollmill.runtime.telemetry.clock import Clock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import COMPLETIONS, SESSIONS
from rollmill_capture.admission import Admission, NoCapacityError
from rollmill_capture.bodies import parse_object, read_body
from rollmill_capture.coordination.closed_session import spec_of_closed
from rollmill_capture.coordination.tenants import QuotaExceededError, QuotaGuard, Tenant
from rollmill_capture.errors import ApiError, json_response
from rollmill_capture.event_log.event_writer import EventWriter, NotAcknowledgedError
from rollmill_capture.http.keys import SessionTokens
from rollmill_capture.http.requests import Access, SessionResolver, no_session, require_name
from rollmill_capture.http.session_requests import (
    CloseRequest,
    OpenRequest,
    UnacknowledgedEvents,
    agent_environment,
    read_close_request,
    read_open_request,
    refuse_large_rewards,
)

R = TypeVar("R")

CREATED = 201
UNPROCESSABLE = 422
OPEN_BYTES = SESSIONS.max_bytes // 2
CLOSE_BYTES = COMPLETIONS.max_bytes - 2**20
"""Largest bodies: the records that they become have to fit their topics."""
LOCKS = 256


@dataclass(frozen=True)
class SessionApi:
    resolver: SessionResolver
    event_writer: EventWriter
    clock: Clock
    metrics: Metrics
    public_url: str
    policies: frozenset[str]
    """Those that some route trains; empty: nothing is trained, and any name will do."""
    close_seconds: float
    admission: Admission
    validate: Callable[[SessionSpec], None]
    """Raises InvalidInputError for unknown strategies and bad configs."""
    locks: tuple[asyncio.Lock, ...] = field(default_factory=lambda: tuple(asyncio.Lock() for _ in range(LOCKS)))
    """Requests about one session go one by one."""
    unacknowledged: UnacknowledgedEvents = field(default_factory=UnacknowledgedEvents)
    tokens: SessionTokens = field(default_factory=SessionTokens)
    quotas: QuotaGuard | None = None
    max_reward: float = LARGEST_REWARD
    token_may_close: bool = True

    async def open(self, request: Request) -> Response:
        tenant = self.resolver.tenant_of(request)
        opening = _with_tenant(await self._read(request, read_open_request, OPEN_BYTES), tenant)
        self._check(opening.spec)
        name = opening.session_id or uuid.uuid4().hex
        async with self._lock(name):
            if opening.session_id is not None:
                await self.resolver.catch_up()
            session_id, spec = self._recorded(tenant, name, opening.spec)
            known = self.resolver.own_entry(tenant, session_id, name)
            if known is not None and known.attempt >= opening.attempt:
                return await self._reopen(known, opening)
            with self._within_quota(tenant, spec, known):
                entry = await self._admit(session_id, replace(opening, spec=spec))
        self.metrics.count("sessions_opened", purpose=entry.spec.purpose.value)
        return json_response(self._with_access(entry), CREATED)

    async def show(self, request: Request) -> Response:
        """For the tenant alone: the spec may hold what an agent is graded by. Of a closed session it is not kept."""
        entry = await self.resolver.tenants_session(request)
        is_open = entry.state is SessionState.OPEN
        spec = self.resolver.sent_spec(entry).model_dump(mode="json") if is_open else None
        return json_response({**self._summary(entry), "opened_at": entry.opened_at, "spec": spec})

    async def close(self, request: Request) -> Response:
        """Waits for the session's calls in flight on this replica; a close with equal content is answered again."""
        access = await self.resolver.access(request)
        closing = self._allowed(access, await self._read(request, read_close_request, CLOSE_BYTES))
        session_id, name = access.entry.session_id, self.resolver.name_of(access.entry)
        with self.resolver.in_flight.closing(session_id):
            await self._wait_idle(session_id, name)
            async with self._lock(name):
                return json_response(self._summary(await self._close(session_id, name, closing)))

    def _recorded(self, tenant: Tenant, name: str, spec: SessionSpec) -> tuple[str, SessionSpec]:
        """The id and the spec as they are recorded. Raises ApiError (422)."""
        session_id = self.resolver.recorded_id(tenant, name)
        try:
            require_name(session_id, "session_id")
            return session_id, self.resolver.recorded_spec(tenant, spec)
        except InvalidInputError as error:
            raise ApiError(UNPROCESSABLE, str(error)) from error

    @contextmanager
    def _within_quota(self, tenant: Tenant, spec: SessionSpec, replaced: SessionEntry | None) -> Iterator[None]:
        if self.quotas is None:
            yield
            return
        try:
            with self.quotas.opening(tenant, spec, self.clock.now(), replaced):
                yield
        except QuotaExceededError as error:
            raise ApiError(429, str(error), retry=True, retry_after=error.retry_after) from error

    def _allowed(self, access: Access, closing: CloseRequest) -> CloseRequest:
        """What the agent that is graded may do with its session's token. Raises ApiError (403, 422)."""
        try:
            refuse_large_rewards([closing.fields.get("reward")], self.max_reward)
        except InvalidInputError as error:
            raise ApiError(UNPROCESSABLE, str(error)) from error
        if access.by_tenant:
            return closing
        if not self.token_may_close or {"reward", "output"} & set(closing.fields):
            may = "without `reward` and `output`" if self.token_may_close else "with the tenant's key alone"
            raise ApiError(403, f"a session's own api_key does not grade it: close it {may}, or use the tenant's key")
        return replace(closing, attempt=closing.attempt or access.entry.attempt)

    async def _read(self, request: Request, read: Callable[[dict[str, Any]], R], limit: int) -> R:
        try:
            return read(parse_object(await read_body(request, limit)))
        except InvalidInputError as error:
            raise ApiError(UNPROCESSABLE, str(error)) from error

    def _check(self, spec: SessionSpec) -> None:
        if self.policies and spec.policy not in self.policies:
            raise ApiError(
                UNPROCESSABLE, f"policy {spec.policy!r} is trained by no route: {', '.join(sorted(self.policies))} is"
            )
        try:
            self.validate(spec)
        except InvalidInputError as error:
            raise ApiError(UNPROCESSABLE, str(error)) from error

    async def _reopen(self, known: SessionEntry, opening: OpenRequest) -> Response:
        is_newest, is_closed = known.attempt == opening.attempt, known.state is SessionState.CLOSED
        if is_newest and not is_closed and opening.spec in (known.spec, self.resolver.sent_spec(known)):
            if self.tokens.of(known) is None:
                # Opened at another replica, or before a restart: the token is not known here any more.
                known = await self._with_new_token(known)
            return json_response(self._with_access(known))
        state = "and is closed" if is_newest and is_closed else "with another spec"
        raise ApiError(
            409,
            f"session {self.resolver.name_of(known)!r}, attempt {known.attempt}, was opened {state}; choose another "
            "session_id, or a higher attempt",
        )

    async def _admit(self, session_id: str, opening: OpenRequest) -> SessionEntry:
        """Raises ApiError (429) where the session's group may not start now."""
        if self.admission.is_limited(opening.spec):
            # What other replicas have admitted counts, too: all that is written by now is read first.
            await self.resolver.catch_up()
        try:
            self.admission.admit(session_id, opening.spec, self.clock.now())
        except NoCapacityError as error:
            self.metrics.count("sessions_turned_away", policy=opening.spec.policy)
            raise ApiError(429, str(error), retry=True, retry_after=error.retry_after) from error
        try:
            return await self._write_opening(session_id, opening)
        except ApiError:
            self.admission.withdraw(session_id, opening.spec)
            raise

    async def _write_opening(self, session_id: str, opening: OpenRequest) -> SessionEntry:
        attempt, spec = opening.attempt, opening.spec
        event = self.unacknowledged.sent_before(
            SessionOpened(session_id=session_id, attempt=attempt, spec=spec, at=self.clock.now())
        )
        entry = SessionEntry(
            session_id=session_id,
            attempt=attempt,
            state=SessionState.OPEN,
            spec=spec,
            opened_at=event.at,
            token=self.tokens.new(session_id),
        )
        await self._write(event, entry)
        return entry

    async def _with_new_token(self, entry: SessionEntry) -> SessionEntry:
        renewed = entry.replace(token=self.tokens.new(entry.session_id))
        await self._append_entry(renewed)
        self.resolver.table.apply(renewed)
        return renewed

    async def _append_entry(self, entry: SessionEntry) -> None:
        value = encode(entry, JSON)
        try:
            with self.event_writer.reserve_space(len(value)):
                await self.event_writer.append(SESSIONS, entry.session_id, value)
        except NotAcknowledgedError as error:
            raise ApiError(503, f"{error}; ask again", retry=True) from error
        except BackpressureError as error:
            raise ApiError(503, str(error), retry=True, retry_after=error.retry_after) from error

    async def _wait_idle(self, session_id: str, name: str) -> None:
        try:
            async with asyncio.timeout(self.close_seconds):
                await self.resolver.in_flight.wait_until_idle(session_id)
        except TimeoutError:
            raise ApiError(
                409, f"session {name!r} still has calls in flight; cancel them, then close it", retry=True
            ) from None

    async def _close(self, session_id: str, name: str, closing: CloseRequest) -> SessionEntry:
        entry = await self.resolver.newest(session_id)
        if entry is None:
            raise no_session(name)
        if closing.attempt not in (None, entry.attempt):
            raise ApiError(409, f"session {name!r} is at attempt {entry.attempt}, not {closing.attempt}")
        if entry.state is SessionState.CLOSED:
            return _closed_before(entry, name, closing)
        event = self.unacknowledged.sent_before(
            SessionClosed(session_id=session_id, attempt=entry.attempt, at=self.clock.now(), **closing.fields)
        )
        closed = entry.replace(
            state=SessionState.CLOSED, closing=closing.digest, closed_at=event.at, spec=spec_of_closed(entry.spec)
        )
        await self._write(event, closed)
        self.metrics.count("sessions_closed", status=event.status.value)
        return closed

    async def _write(self, event: SessionOpened | SessionClosed, entry: SessionEntry) -> None:
        """First the event, then the entry: a reader that finds the entry can rely on the event."""
        event_bytes, entry_bytes = encode(event), encode(entry, JSON)
        try:
            with self.event_writer.reserve_space(len(event_bytes) + len(entry_bytes)):
                await self.event_writer.append(COMPLETIONS, event.session_id, event_bytes)
                await self.event_writer.append(SESSIONS, entry.session_id, entry_bytes)
        except NotAcknowledgedError as error:
            self.unacknowledged.keep(event)
            raise ApiError(503, f"{error}; ask again", retry=True) from error
        except BackpressureError as error:
            raise ApiError(503, str(error), retry=True, retry_after=error.retry_after) from error
        self.unacknowledged.forget(event)
        self.resolver.table.apply(entry)

    def _lock(self, name: str) -> asyncio.Lock:
        return self.locks[hash(name) % len(self.locks)]

    def _summary(self, entry: SessionEntry) -> dict[str, Any]:
        return {
            "session_id": self.resolver.name_of(entry),
            "attempt": entry.attempt,
            "state": entry.state.value,
            "base_url": self._base_url(entry),
        }

    def _with_access(self, entry: SessionEntry) -> dict[str, Any]:
        """With all that an agent needs: only the caller that opens a session gets its token."""
        token, summary = self.tokens.of(entry) or entry.session_id, self._summary(entry)
        environment = agent_environment(entry, summary, token)
        return {**summary, "api_key": token, "environment": environment}

    def _base_url(self, entry: SessionEntry) -> str:
        return f"{self.public_url}/sessions/{self.resolver.name_of(entry)}/v1"


def _with_tenant(opening: OpenRequest, tenant: str | None) -> OpenRequest:
    if tenant is None:
        return opening
    metadata = {**opening.spec.metadata, TENANT: tenant}
    return replace(opening, spec=opening.spec.replace(metadata=metadata))


def _closed_before(entry: SessionEntry, name: str, closing: CloseRequest) -> SessionEntry:
    if entry.closing == closing.digest:
        return entry
    raise ApiError(409, f"session {name!r} was closed before, with another status, output or reward")
