"""A model call by any API: whose call is it, what does it ask, and then one `CallHandler`, unless the client leaves."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from rollmill.errors import BackpressureError, InvalidInputError
from rollmill.models import CallKind, SessionEntry
from rollmill_capture.apis.api import ApiAdapter
from rollmill_capture.apis.history_cache import HistoryCache, SessionHistory
from rollmill_capture.errors import ApiError
from rollmill_capture.http.session_resolver import SessionResolver
from rollmill_capture.json_body import parse_object, read_body
from rollmill_capture.proxy.call_handler import CallHandler
from rollmill_capture.proxy.completion_record import Call
from rollmill_capture.proxy.recorder import Recorder
from rollmill_capture.proxy.response_stream import ResponseStream
from rollmill_capture.proxy.upstream_request import UpstreamRequest, prepare
from rollmill_capture.upstream.capabilities import EngineCapabilities
from rollmill_capture.upstream.client import RouteTable, Target, Upstream

KIND = "x-rollmill-call"
ATTEMPT = "x-rollmill-attempt"
"""Set by the fence alone."""
RETRY_HEADERS = {
    "idempotency_key": "idempotency-key",
    "client_request_id": "x-request-id",
    "client_retries": "x-stainless-retry-count",
}
"""Names in a record's metadata, and the headers that SDKs send."""
KEY_LENGTH = 256


@dataclass(frozen=True)
class Caller:
    """What the endpoints of all APIs share."""

    desk: SessionResolver
    routes: RouteTable
    upstream: Upstream
    recorder: Recorder
    engines: EngineCapabilities
    memory: HistoryCache
    request_bytes: int
    keep_alive_seconds: float


@dataclass(frozen=True)
class CallEndpoint:
    """An ASGI application: what streams must see the client leave, which a returned response does not."""

    caller: Caller
    api: ApiAdapter
    native: ApiAdapter | None = None
    """In place of ``api`` where the route's upstream speaks it itself."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        client = ResponseStream(scope, receive, send, self.api.error_format)
        desk = self.caller.desk
        try:
            entry = await desk.caller(request)
            with desk.in_flight.call(entry.session_id):
                await self._attend(entry, request, client)
        except ApiError as refusal:
            await client.reply(refusal)
        except ClientDisconnect:
            self.caller.recorder.metrics.count("abandoned_requests")
        finally:
            await client.let_be()

    async def _attend(self, entry: SessionEntry, request: Request, client: ResponseStream) -> None:
        caller = self.caller
        self._show_load()
        call = await self._call(entry, request, await read_body(request, caller.request_bytes))
        exchange = CallHandler(call, caller.upstream, caller.recorder, client, caller.keep_alive_seconds)
        try:
            with exchange.room():
                await attend(exchange, client)
        except BackpressureError as error:
            await exchange.turn_away(error)
        finally:
            self._show_load()

    def _show_load(self) -> None:
        self.caller.recorder.metrics.gauge("in_flight", self.caller.desk.in_flight.total)

    async def _call(self, entry: SessionEntry, request: Request, raw: bytes) -> Call:
        recorder = self.caller.recorder
        said = _kind(request.headers)
        target, served = await self._served(entry, request, raw)
        return Call(
            session_id=entry.session_id,
            attempt=entry.attempt,
            completion_id=uuid.uuid4().hex,
            kind=said or target.route.kind,
            target=target,
            served=served,
            started_at=recorder.clock.now(),
            announced=recorder.announced.newest(target.route.policy),
            metadata=self._metadata(request.headers),
        )

    def _metadata(self, headers: Headers) -> dict[str, Any]:
        api = {} if self.api.name == "chat" else {"api": self.api.name}
        return {**api, **retry_metadata(headers)}

    async def _served(self, entry: SessionEntry, request: Request, raw: bytes) -> tuple[Target, UpstreamRequest]:
        caller, params = self.caller, request.path_params
        place = {**request.query_params, **params} if request.url.query else params
        try:
            body = parse_object(raw)
            model = params.get("model", body.get("model"))
            target = caller.routes.find(model if isinstance(model, str) else None)
            asked = self._api(target).parse_request(body, place, SessionHistory(caller.memory, entry.session_id))
        except InvalidInputError as error:
            raise ApiError(400, str(error)) from error
        capability, route = await caller.engines.of(target), target.route
        return target, prepare(raw, asked, model=route.model, defaults=route.defaults, capability=capability)

    def _api(self, target: Target) -> ApiAdapter:
        native = self.native
        return native if native is not None and native.name in target.route.native else self.api


def retry_metadata(headers: Headers) -> dict[str, Any]:
    """What tells a client's tries of one call apart."""
    found = {name: headers.get(header, "")[:KEY_LENGTH] for name, header in RETRY_HEADERS.items()}
    attempt = {"attempt": int(headers[ATTEMPT])} if ATTEMPT in headers else {}
    return {**{name: value for name, value in found.items() if value}, **attempt}


def _kind(headers: Headers) -> CallKind | None:
    """None: the request does not say it."""
    word = headers.get(KIND)
    try:
        return None if word is None else CallKind(word)
    except ValueError:
        raise ApiError(400, f"header {KIND} is {word!r}; it may be 'agent' or 'aux'", param=KIND) from None


async def attend(exchange: CallHandler, client: ResponseStream) -> None:
    """Run the exchange; when the client leaves before its record is under way, cancel it and keep what there is."""
    work = asyncio.create_task(exchange.run())
    gone = asyncio.create_task(client.left())
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and not exchange.recording:
            work.cancel()
            await asyncio.wait((work,))
            await exchange.gone()
        else:
            await work
    finally:
        work.cancel()
        gone.cancel()
