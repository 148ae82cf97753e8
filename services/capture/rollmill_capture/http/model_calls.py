"""A model call by any API: finds its session, parses its request, and hands it to a `CallHandler`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from rollmill.errors import InvalidInputError
from rollmill.models import CallKind, SessionEntry
from rollmill_capture.apis.api import ApiAdapter
from rollmill_capture.apis.history_cache import HistoryCache, SessionHistory
from rollmill_capture.bodies import parse_object, read_body
from rollmill_capture.coordination.tenants import QuotaExceededError, QuotaGuard
from rollmill_capture.errors import ApiError
from rollmill_capture.http.keys import TOKEN_START
from rollmill_capture.http.requests import SESSION_HEADER, SessionResolver
from rollmill_capture.proxy.call_handler import CallHandler
from rollmill_capture.proxy.recorder import Call, Recorder
from rollmill_capture.proxy.response_stream import ResponseStream
from rollmill_capture.proxy.upstream_request import UpstreamRequest, prepare
from rollmill_capture.upstream.capabilities import EngineCapabilities
from rollmill_capture.upstream.client import RouteTable, Target, Upstream

KIND = "x-rollmill-call"
ATTEMPT = "x-rollmill-attempt"
"""Set by `rollmill_capture.http.idempotency` alone."""
RETRY_HEADERS = {
    "idempotency_key": "idempotency-key",
    "client_request_id": "x-request-id",
    "client_retries": "x-stainless-retry-count",
}
"""Names in a record's metadata, and the headers that SDKs send."""
KEY_LENGTH = 256


@dataclass(frozen=True)
class CallContext:
    """What the endpoints of all APIs share."""

    resolver: SessionResolver
    routes: RouteTable
    upstream: Upstream
    recorder: Recorder
    engines: EngineCapabilities
    history: HistoryCache
    request_bytes: int
    keep_alive_seconds: float
    quotas: QuotaGuard | None = None


@dataclass(frozen=True)
class CallEndpoint:
    """An ASGI application: a stream must notice that the client leaves, which a returned response does not."""

    context: CallContext
    api: ApiAdapter
    native: ApiAdapter | None = None
    """In place of ``api`` where the route's upstream has that API itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, context = Request(scope, receive), self.context
        response = ResponseStream(scope, receive, send, self.api.error_format)
        try:
            session = await context.resolver.calling_session(request)
            with self._within_quota(session), self._in_flight(session):
                call = await self._read_call(session, request)
                handler = CallHandler(call, context.upstream, context.recorder, response, context.keep_alive_seconds)
                await handler.handle()
        except ApiError as error:
            await response.reply(error)
        except ClientDisconnect:
            context.recorder.metrics.count("abandoned_requests")
        finally:
            await response.stop_keepalive()

    @contextmanager
    def _in_flight(self, session: SessionEntry) -> Iterator[None]:
        metrics, in_flight = self.context.recorder.metrics, self.context.resolver.in_flight
        try:
            with in_flight.call(session.session_id):
                metrics.gauge("in_flight", in_flight.total)
                yield
        finally:
            metrics.gauge("in_flight", in_flight.total)

    @contextmanager
    def _within_quota(self, session: SessionEntry) -> Iterator[None]:
        if self.context.quotas is None:
            yield
            return
        try:
            with self.context.quotas.call(session.tenant):
                yield
        except QuotaExceededError as error:
            raise ApiError(429, str(error), retry=True, retry_after=error.retry_after) from error

    async def _read_call(self, session: SessionEntry, request: Request) -> Call:
        recorder, raw = self.context.recorder, await read_body(request, self.context.request_bytes)
        kind = _kind(request.headers)
        target, upstream_request = await self._prepare(session, request, raw)
        api = {} if self.api.name == "chat" else {"api": self.api.name}
        return Call(
            session_id=session.session_id,
            attempt=session.attempt,
            completion_id=uuid.uuid4().hex,
            kind=kind or target.route.kind,
            target=target,
            request=upstream_request,
            started_at=recorder.clock.now(),
            announced=recorder.announced.newest(target.route.policy),
            metadata={**api, **retry_metadata(request.headers), **self._clients_session(session, request.headers)},
        )

    def _clients_session(self, session: SessionEntry, headers: Headers) -> dict[str, Any]:
        """A harness's own id of its session, where it sends one under the name of capture's header."""
        given = headers.get(SESSION_HEADER, "")[:KEY_LENGTH]
        if not given:
            return {}
        own = (session.session_id, self.context.resolver.name_of(session))
        is_token = given.startswith(TOKEN_START)
        return {} if given in own or is_token else {"client_session_id": given}

    async def _prepare(self, session: SessionEntry, request: Request, raw: bytes) -> tuple[Target, UpstreamRequest]:
        context, path_params = self.context, request.path_params
        params = {**request.query_params, **path_params} if request.url.query else path_params
        try:
            body = parse_object(raw)
            model = path_params.get("model", body.get("model"))
            target = context.routes.find(model if isinstance(model, str) else None)
            api = self.api if self.native is None or self.native.name not in target.route.native else self.native
            parsed = api.parse_request(body, params, SessionHistory(context.history, session.session_id))
        except InvalidInputError as error:
            raise ApiError(400, str(error)) from error
        capability, route = await context.engines.of(target), target.route
        return target, prepare(raw, parsed, model=route.model, defaults=route.defaults, capability=capability)


def retry_metadata(headers: Headers) -> dict[str, Any]:
    """What tells a client's tries of one call apart."""
    found = {name: headers.get(header, "")[:KEY_LENGTH] for name, header in RETRY_HEADERS.items()}
    attempt = {"attempt": int(headers[ATTEMPT])} if ATTEMPT in headers else {}
    return {**{name: value for name, value in found.items() if value}, **attempt}


def _kind(headers: Headers) -> CallKind | None:
    """None: the request has no such header."""
    kind = headers.get(KIND)
    try:
        return None if kind is None else CallKind(kind)
    except ValueError:
        raise ApiError(400, f"header {KIND} is {kind!r}; it may be 'agent' or 'aux'", param=KIND) from None
