"""The route of chat completions: whose call is it, and then one `Exchange`, unless the client leaves."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from rollmill.errors import InvalidInputError
from rollmill.models import CallKind, SessionEntry
from rollmill_capture.bodies import parse_object, read_body
from rollmill_capture.client import Client
from rollmill_capture.desk import SessionDesk
from rollmill_capture.exchange import Exchange
from rollmill_capture.recorder import Recorder
from rollmill_capture.records import Call
from rollmill_capture.replies import RefusalError
from rollmill_capture.routes import RouteTable
from rollmill_capture.served import check_request, serve
from rollmill_capture.upstream import Upstream

KIND = "x-rollmill-call"
IDEMPOTENCY_KEY = "idempotency-key"
ATTEMPT = "x-rollmill-attempt"
"""Set by the fence alone."""
RETRY_HEADERS = {
    "idempotency_key": IDEMPOTENCY_KEY,
    "client_request_id": "x-request-id",
    "client_retries": "x-stainless-retry-count",
}
"""Names in a record's metadata, and the headers that SDKs send."""
KEY_LENGTH = 256


@dataclass(frozen=True)
class ChatEndpoint:
    """An ASGI application: what streams must see the client leave, which a returned response does not."""

    desk: SessionDesk
    routes: RouteTable
    upstream: Upstream
    recorder: Recorder
    request_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        client = Client(scope, receive, send)
        try:
            entry = await self.desk.caller(request)
            with self.desk.in_flight.call(entry.session_id):
                await self._attend(entry, request, client)
        except RefusalError as refusal:
            await client.reply(refusal)
        except ClientDisconnect:
            self.recorder.metrics.count("abandoned_requests")

    async def _attend(self, entry: SessionEntry, request: Request, client: Client) -> None:
        self._show_load()
        call = self._call(entry, request.headers, await read_body(request, self.request_bytes))
        try:
            await attend(Exchange(call, self.upstream, self.recorder, client), client)
        finally:
            self._show_load()

    def _show_load(self) -> None:
        self.recorder.metrics.gauge("in_flight", self.desk.in_flight.total)

    def _call(self, entry: SessionEntry, headers: Headers, raw: bytes) -> Call:
        try:
            body = parse_object(raw)
            check_request(body)
        except InvalidInputError as error:
            raise RefusalError(400, str(error)) from error
        model = body.get("model")
        target = self.routes.find(model if isinstance(model, str) else None)
        return Call(
            session_id=entry.session_id,
            attempt=entry.attempt,
            completion_id=uuid.uuid4().hex,
            kind=_kind(headers),
            target=target,
            served=serve(raw, body, target.route.model),
            started_at=self.recorder.clock.now(),
            announced=self.recorder.announced.newest(target.route.policy),
            metadata=retry_metadata(headers),
        )


def retry_metadata(headers: Headers) -> dict[str, Any]:
    """What tells a client's tries of one call apart."""
    found = {name: headers.get(header, "")[:KEY_LENGTH] for name, header in RETRY_HEADERS.items()}
    attempt = {"attempt": int(headers[ATTEMPT])} if ATTEMPT in headers else {}
    return {**{name: value for name, value in found.items() if value}, **attempt}


def _kind(headers: Headers) -> CallKind:
    word = headers.get(KIND, CallKind.AGENT)
    try:
        return CallKind(word)
    except ValueError:
        raise RefusalError(400, f"header {KIND} is {word!r}; it may be 'agent' or 'aux'", param=KIND) from None


async def attend(exchange: Exchange, client: Client) -> None:
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
