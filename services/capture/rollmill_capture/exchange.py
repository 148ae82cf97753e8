"""One call from the client's request to the acknowledged record: engine, reading, record, reply (RULES S4)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx
import orjson
import structlog
from starlette.responses import Response

from rollmill.errors import BackpressureError
from rollmill.models import CallStatus
from rollmill_capture.apis.same import Same
from rollmill_capture.client import Client
from rollmill_capture.engines import Reading
from rollmill_capture.engines.chat import error_of
from rollmill_capture.engines.details import without_details
from rollmill_capture.recorder import Recorder, RecordTooLargeError
from rollmill_capture.records import Call, Ending, room_for
from rollmill_capture.relay import Relay, as_stream, make_relay
from rollmill_capture.replies import JSON, RefusalError, json_response
from rollmill_capture.served import ServedRequest
from rollmill_capture.sink import NotAcknowledgedError
from rollmill_capture.upstream import BAD_GATEWAY, Upstream, UpstreamError, upstream_error

OK = 200
AFTER_DONE_SECONDS = 1.0
"""For the end of the body after the stream's last frame, so that the connection can be used again."""
PASSED_ON = ("retry-after", "x-should-retry")
"""Headers of a refusal that tell clients what to do."""

_NOT_RECORDED = (NotAcknowledgedError, RecordTooLargeError)


@dataclass(frozen=True)
class Outcome:
    """What goes into the log, and what the client gets once it is there: a whole response, the end of its stream, or
    an error.
    """

    ending: Ending
    reply: Response | bytes | RefusalError


class Exchange:
    """Runs one call. ``run`` may be cancelled until ``recording`` is true; then the record is under way."""

    def __init__(
        self, call: Call, upstream: Upstream, recorder: Recorder, client: Client, keep_alive_seconds: float = 15.0
    ) -> None:
        self._call = call
        self._upstream = upstream
        self._recorder = recorder
        self._client = client
        self._keep_alive_seconds = keep_alive_seconds
        self._relay = make_relay(call.served) if call.served.streams else None
        self.recording = False

    async def run(self) -> None:
        """Answer the client, whatever happens; a reply that ends normally is in the log before its end is sent."""
        try:
            with self._recorder.sink.room(room_for(self._call)):
                await self._run()
        except BackpressureError as error:
            # Before the engine was called: nothing was sampled, and there is nothing to record.
            self._recorder.metrics.count("turned_away", reason=type(error).__name__)
            await self._client.reply(RefusalError(503, str(error), retry=True, retry_after=error.retry_after))

    async def _run(self) -> None:
        outcome = await self._outcome()
        self.recording = True
        try:
            await self._recorder.record(self._call, outcome.ending)
        except _NOT_RECORDED as error:
            await self._not_recorded(outcome, error)
        else:
            if outcome.ending.status is CallStatus.OK:
                self._client.settled()
            await self._client.reply(outcome.reply)

    async def gone(self) -> None:
        """The client has left, and the call upstream is cancelled: keep what was sampled until then."""
        reading = Reading() if self._relay is None else self._relay.reading()
        ending = Ending(CallStatus.CLIENT_GONE, reading, error="the client left before its reply ended")
        try:
            await self._recorder.record(self._call, ending)
        except _NOT_RECORDED as error:
            self._complain(error)

    async def _outcome(self) -> Outcome:
        async with self._upstream.pauses.passage(self._call.target.route.policy):
            # The version that counts is the one in front of the engine, not the one in front of the gate.
            call = self._call = self._recorder.started(self._call)
            return await self._asked(call)

    async def _asked(self, call: Call) -> Outcome:
        served = call.served
        try:
            if served.stream and not served.streams:
                self._client.keep_alive(self._keep_alive_seconds)
            async with self._upstream.chat(call.target, served.body, call.completion_id, served.wire.path) as response:
                if response.status_code != OK:
                    return self._refused(response.status_code, response.headers, await response.aread())
                if self._relay is None:
                    return self._whole(await response.aread())
                self._client.keep_alive(self._keep_alive_seconds)
                return await self._streamed(response, self._relay)
        except UpstreamError as error:
            return _unanswered(error)

    def _whole(self, raw: bytes) -> Outcome:
        served = self._call.served
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return _broken(Reading(incomplete="not_json"))
        reading = served.wire.read_body(body, served.prompt_ids)
        if not reading.complete:
            return _broken(reading)
        shown = as_stream(served.answer.voice(), body) if served.stream else served.answer.whole(raw, body)
        # The log's response has no details, whatever the client's has: they are in the record's arrays.
        stripped = shown if _strips(served) else orjson.dumps(without_details(body))
        reply = shown if served.stream else Response(shown, OK, media_type=JSON)
        return Outcome(Ending(CallStatus.OK, reading, OK, response=stripped), reply)

    async def _streamed(self, response: httpx.Response, relay: Relay) -> Outcome:
        trouble: UpstreamError | None = None
        try:
            await self._pump(response, relay)
        except httpx.HTTPError as error:
            trouble = upstream_error(error, self._call.target)
        reading = relay.reading()
        if not reading.complete:
            return _broken(reading, trouble)
        return Outcome(Ending(CallStatus.OK, reading, OK), relay.held)

    async def _pump(self, response: httpx.Response, relay: Relay) -> None:
        """Forward until the body ends. After the last frame it is only read out, for a moment."""
        try:
            async with asyncio.timeout(None) as patience:
                async for chunk in response.aiter_bytes():
                    await self._client.forward(relay.feed(chunk))
                    if relay.over and patience.when() is None:
                        patience.reschedule(asyncio.get_running_loop().time() + AFTER_DONE_SECONDS)
        except TimeoutError:
            if not relay.over:
                raise

    async def _not_recorded(self, outcome: Outcome, error: Exception) -> None:
        """A reply must not look whole that the log does not have; an error may be told all the same."""
        self._complain(error)
        if outcome.ending.status is CallStatus.OK:
            message = f"the reply was not recorded, so it is withheld: {error}"
            await self._client.reply(RefusalError(BAD_GATEWAY, message, retry=True))
        else:
            await self._client.reply(outcome.reply)

    def _refused(self, status: int, headers: httpx.Headers, body: bytes) -> Outcome:
        """The upstream's refusal is passed on: as it is, or in the shape of the caller's API where that is another."""
        answer, message = self._call.served.answer, _message(body)
        hints = {name: headers[name] for name in PASSED_ON if name in headers}
        reply = Response(body, status, hints, headers.get("content-type", JSON))
        if not isinstance(answer, Same):
            reply = json_response(answer.shape.error(status, message), status, hints)
        return Outcome(Ending(CallStatus.ERROR, http_status=status, error=message, response=_as_json(body)), reply)

    def _complain(self, error: Exception) -> None:
        call = self._call
        structlog.get_logger().error(
            "a call was not recorded", session=call.session_id, completion=call.completion_id, error=str(error)
        )


def _strips(served: ServedRequest) -> bool:
    """What the client gets is what the log gets."""
    return not served.stream and isinstance(served.answer, Same) and served.answer.strip is without_details


def _unanswered(error: UpstreamError) -> Outcome:
    return Outcome(Ending(CallStatus.ERROR, error=str(error)), RefusalError(error.status, str(error), retry=True))


def _broken(reading: Reading, trouble: UpstreamError | None = None) -> Outcome:
    """Status 200, and yet no whole reply."""
    detail = reading.error or (str(trouble) if trouble is not None else "")
    message = f"{reading.incomplete}: {detail}" if detail else str(reading.incomplete)
    ending = Ending(CallStatus.INCOMPLETE, reading, OK, error=message)
    return Outcome(ending, RefusalError(BAD_GATEWAY, f"the upstream's reply is not whole ({message})", retry=True))


def _message(body: bytes) -> str:
    return error_of(_loaded(body)) or body[:200].decode("utf-8", "replace")


def _as_json(body: bytes) -> bytes | None:
    return body if isinstance(_loaded(body), (dict, list)) and body[:1] in (b"{", b"[") else None


def _loaded(body: bytes) -> object:
    try:
        loaded: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return loaded
