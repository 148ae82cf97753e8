"""The sessions' API: open, show, close. Each answer comes after Kafka's acknowledgement."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from rollmill.codec import JSON, encode
from rollmill.errors import BackpressureError, InvalidInputError
from rollmill.models import SessionClosed, SessionEntry, SessionOpened, SessionSpec, SessionState
from rollmill.runtime.telemetry.clock import Clock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import COMPLETIONS, SESSIONS
from rollmill_capture.admission import Admission, NoCapacityError
from rollmill_capture.errors import ApiError, json_response
from rollmill_capture.event_log.event_writer import EventWriter, NotAcknowledgedError
from rollmill_capture.http.requests import (
    TENANT,
    SessionResolver,
    digest_of,
    is_token_of,
    new_token,
    parse_object,
    read_body,
)
from rollmill_capture.http.session_requests import (
    CloseRequest,
    OpenRequest,
    UnacknowledgedEvents,
    read_close_request,
    read_open_request,
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
    tokens: Tokens = field(default_factory=lambda: Tokens())  # noqa: PLW0108  # defined below

    async def open(self, request: Request) -> Response:
        tenant = self.resolver.tenant_of(request)
        opening = _with_tenant(await self._read(request, read_open_request, OPEN_BYTES), tenant)
        self._check(opening.spec)
        session_id = opening.session_id or uuid.uuid4().hex
        async with self._lock(session_id):
            known = None if opening.session_id is None else await self.resolver.newest(session_id)
            if known is not None and known.attempt >= opening.attempt:
                return await self._reopen(known, opening)
            entry = await self._admit(session_id, opening)
        self.metrics.count("sessions_opened", purpose=entry.spec.purpose.value)
        return json_response(self._with_access(entry), CREATED)

    async def show(self, request: Request) -> Response:
        entry = await self.resolver.owned_session(request, request.path_params["session_id"])
        spec = entry.spec.model_dump(mode="json")
        return json_response({**self._summary(entry), "opened_at": entry.opened_at, "spec": spec})

    async def close(self, request: Request) -> Response:
        """Waits for the session's calls in flight on this replica; a close with equal content is answered again."""
        entry = await self.resolver.owned_session(request, request.path_params["session_id"])
        closing = await self._read(request, read_close_request, CLOSE_BYTES)
        with self.resolver.in_flight.closing(entry.session_id):
            await self._wait_idle(entry.session_id)
            async with self._lock(entry.session_id):
                return json_response(self._summary(await self._close(entry.session_id, closing)))

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
        same = known.attempt == opening.attempt and known.spec == opening.spec
        if same and known.state is SessionState.OPEN:
            if self.tokens.of(known) is None:
                # Opened at another replica, or before a restart: the token is not known here any more.
                known = await self._with_new_token(known)
            return json_response(self._with_access(known))
        state = "with another spec" if not same else "and is closed"
        raise ApiError(
            409,
            f"session {known.session_id!r}, attempt {known.attempt}, was opened {state}; choose another session_id, "
            "or a higher attempt",
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

    async def _wait_idle(self, session_id: str) -> None:
        try:
            async with asyncio.timeout(self.close_seconds):
                await self.resolver.in_flight.wait_until_idle(session_id)
        except TimeoutError:
            raise ApiError(
                409, f"session {session_id!r} still has calls in flight; cancel them, then close it", retry=True
            ) from None

    async def _close(self, session_id: str, closing: CloseRequest) -> SessionEntry:
        entry = await self.resolver.newest(session_id) or await self.resolver.get(session_id)
        if closing.attempt not in (None, entry.attempt):
            raise ApiError(409, f"session {session_id!r} is at attempt {entry.attempt}, not {closing.attempt}")
        if entry.state is SessionState.CLOSED:
            return _closed_before(entry, closing)
        event = self.unacknowledged.sent_before(
            SessionClosed(session_id=session_id, attempt=entry.attempt, at=self.clock.now(), **closing.fields)
        )
        closed = entry.replace(state=SessionState.CLOSED, closing=closing.digest, closed_at=event.at)
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

    def _lock(self, session_id: str) -> asyncio.Lock:
        return self.locks[hash(session_id) % len(self.locks)]

    def _summary(self, entry: SessionEntry) -> dict[str, Any]:
        return {
            "session_id": entry.session_id,
            "attempt": entry.attempt,
            "state": entry.state.value,
            "base_url": self._base_url(entry),
        }

    def _with_access(self, entry: SessionEntry) -> dict[str, Any]:
        """With all that an agent needs: only the caller that opens a session gets its token."""
        token = self.tokens.of(entry) or entry.session_id
        environment = _environment(entry, self._base_url(entry), token)
        return {**self._summary(entry), "api_key": token, "environment": environment}

    def _base_url(self, entry: SessionEntry) -> str:
        return f"{self.public_url}/sessions/{entry.session_id}/v1"


class Tokens:
    """The tokens of the sessions that were opened here last; only their digests are written down."""

    def __init__(self, max_tokens: int = 100_000) -> None:
        self._tokens: dict[str, str] = {}
        self._max_tokens = max_tokens

    def new(self, session_id: str) -> str:
        """A new token for a session; returns its digest."""
        token = new_token()
        self._tokens.pop(session_id, None)
        self._tokens[session_id] = token
        if len(self._tokens) > self._max_tokens:
            del self._tokens[next(iter(self._tokens))]
        return digest_of(token)

    def of(self, entry: SessionEntry) -> str | None:
        """The session's token, where it is still valid; None: unknown here."""
        token = self._tokens.get(entry.session_id)
        return token if is_token_of(token, entry.token) else None


def _with_tenant(opening: OpenRequest, tenant: str | None) -> OpenRequest:
    if tenant is None:
        return opening
    metadata = {**opening.spec.metadata, TENANT: tenant}
    return replace(opening, spec=opening.spec.replace(metadata=metadata))


def _closed_before(entry: SessionEntry, closing: CloseRequest) -> SessionEntry:
    if entry.closing == closing.digest:
        return entry
    raise ApiError(409, f"session {entry.session_id!r} was closed before, with another status, output or reward")


def _environment(entry: SessionEntry, base_url: str, token: str) -> dict[str, str]:
    """What a process needs so that a stock SDK in it talks to capture."""
    task = {} if entry.spec.task_id is None else {"ROLLMILL_TASK_ID": entry.spec.task_id}
    address = base_url.removesuffix("/v1")  # other SDKs put the version behind it themselves
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": token,
        "GOOGLE_GEMINI_BASE_URL": address,
        "GEMINI_API_KEY": token,
        "ROLLMILL_SESSION_ID": entry.session_id,
        **task,
    }
