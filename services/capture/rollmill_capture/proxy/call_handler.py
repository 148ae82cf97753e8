"""One call from the client's request to the acknowledged record: engine, reading, record, reply (rule S4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import orjson
import structlog
from starlette.responses import Response

from rollmill.errors import BackpressureError
from rollmill.models import CallStatus
from rollmill_capture.apis.openai import PassthroughFormatter, without_details
from rollmill_capture.coordination.policy_versions import version_span
from rollmill_capture.errors import JSON, ApiError, json_response
from rollmill_capture.event_log.event_writer import NotAcknowledgedError
from rollmill_capture.proxy.completion_record import Call, CallResult, room_for
from rollmill_capture.proxy.continuation import (
    TRUNCATED,
    Continuation,
    Rest,
    end_chunk,
    is_aborted,
    joined,
)
from rollmill_capture.proxy.reasoning_parser import CannotContinueError
from rollmill_capture.proxy.recorder import Recorder, RecordTooLargeError
from rollmill_capture.proxy.response_stream import ResponseStream
from rollmill_capture.proxy.stream_relay import StreamRelay, as_stream, make_relay
from rollmill_capture.proxy.tokenization import LOOKED_UP, is_missing, prompt_ids, sampled_text
from rollmill_capture.proxy.upstream_request import UpstreamRequest
from rollmill_capture.upstream.client import BAD_GATEWAY, Upstream, UpstreamError, upstream_error
from rollmill_capture.upstream.formats.parsed_reply import ParsedReply, error_of
from rollmill_capture.upstream.formats.upstream_format import CHAT, COMPLETIONS

OK = 200
AFTER_DONE_SECONDS = 1.0
"""For the end of the body after the stream's last frame, so that the connection can be used again."""
PASSED_ON = ("retry-after", "x-should-retry")
"""Headers of a refusal that tell clients what to do."""

_NOT_RECORDED = (NotAcknowledgedError, RecordTooLargeError)


@dataclass(frozen=True)
class CallReply:
    """What goes into the log, and what the client gets once it is there: a whole response, the end of its stream, or
    an error.
    """

    ending: CallResult
    reply: Response | bytes | ApiError


class CallHandler:
    """Runs one call. ``run`` may be cancelled until ``recording`` is true; then the record is under way."""

    def __init__(
        self,
        call: Call,
        upstream: Upstream,
        recorder: Recorder,
        client: ResponseStream,
        keep_alive_seconds: float = 15.0,
    ) -> None:
        self._call = call
        self._upstream = upstream
        self._recorder = recorder
        self._client = client
        self._keep_alive_seconds = keep_alive_seconds
        self._relay = make_relay(call.served, self._continues) if call.served.streams else None
        self._parts = Continuation(call.served)
        self._version = call.announced
        self._body: Any = None
        """Of a whole reply, the beginning that the engine has broken off."""
        self.recording = False

    async def run(self) -> None:
        """Answer the client, whatever happens; a reply that ends normally is in the log before its end is sent."""
        try:
            await self._run()
        except BackpressureError as error:
            await self.turn_away(error)

    def room(self) -> AbstractContextManager[None]:
        """Inside, the call's record has a place, whatever becomes of Kafka (rule S5): to be held around ``run`` and
        ``gone``. Raises BackpressureError.
        """
        return self._recorder.sink.room(room_for(self._call))

    async def turn_away(self, error: BackpressureError) -> None:
        """Before the engine was called: nothing was sampled, and there is nothing to record."""
        self._recorder.metrics.count("turned_away", reason=type(error).__name__)
        await self._client.reply(ApiError(503, str(error), retry=True, retry_after=error.retry_after))

    async def _run(self) -> None:
        outcome = await self._with_prompt(await self._outcome())
        self.recording = True
        try:
            await self._recorder.record(self._call, outcome.ending)
        except _NOT_RECORDED as error:
            await self._not_recorded(outcome, error)
        else:
            if outcome.ending.status is CallStatus.OK:
                self._client.settled()
            await self._client.reply(outcome.reply)

    async def _with_prompt(self, outcome: CallReply) -> CallReply:
        """With the prompt's ids, where the engine says them beside the call alone."""
        call, ending = self._call, outcome.ending
        if ending.status is not CallStatus.OK or not is_missing(call.served, ending.reading):
            return outcome
        ids = await prompt_ids(self._upstream, call.target, call.served)
        reading = replace(ending.reading, prompt_ids=ids)
        return replace(outcome, ending=replace(ending, reading=reading, metadata={**ending.metadata, **LOOKED_UP}))

    async def gone(self) -> None:
        """The client has left, and the call upstream is cancelled: keep what was sampled until then."""
        reading = self._reading()
        ending = CallResult(CallStatus.CLIENT_GONE, reading, error="the client left before its reply ended")
        try:
            await self._recorder.record(self._call, ending)
        except _NOT_RECORDED as error:
            self._complain(error)

    async def _outcome(self) -> CallReply:
        outcome = await self._first_part()
        while outcome is None:
            outcome = await self._next_part()
        return self._labelled(outcome)

    async def _first_part(self) -> CallReply | None:
        """None: the engine has broken the reply off, and it can be continued."""
        if self._call.served.stream:
            # A pause, a queue or a whole answer may take minutes, and readers of streams give up on silence.
            self._client.keep_alive(self._keep_alive_seconds)
        async with self._upstream.pauses.in_flight(self._call.target.route.policy):
            # The version that counts is the one in front of the engine, not the one in front of the gate.
            call = self._call = self._recorder.started(self._call)
            self._version = call.announced
            return await self._asked(call)

    async def _next_part(self) -> CallReply | None:
        """The same for the rest of a reply; from here on whatever happens has to be recorded."""
        call, reading = self._call, self._reading()
        try:
            async with self._upstream.pauses.in_flight(call.target.route.policy):
                self._version = self._recorder.announced.newest(call.target.route.policy)
                await self._prepare(reading)
                body = self._parts.request(reading, self._recorder.salt(call))
                name = f"{call.completion_id}-{len(self._parts.parts)}"
                async with self._upstream.chat(call.target, body, name, COMPLETIONS.path, call.session_id) as response:
                    return await self._rest(response, reading)
        except (UpstreamError, BackpressureError, CannotContinueError) as error:
            return _broken(self._reading(), error, not_continued=True)

    async def _prepare(self, reading: ParsedReply) -> None:
        """Where the rest has to be read, with the text of what was sampled, which the engine's tokenizer knows."""
        call = self._call
        if self._parts.needs_text(reading):
            text = await sampled_text(self._upstream, call.target, call.served, self._parts.ids(reading))
            self._parts.retell(reading, text, call.completion_id)

    async def _rest(self, response: httpx.Response, reading: ParsedReply) -> CallReply | None:
        if response.status_code != OK:
            error = UpstreamError(f"its rest was refused with {response.status_code}", BAD_GATEWAY)
            return _broken(reading, error, not_continued=True)
        if self._relay is None:
            return self._whole(await response.aread())
        like = self._relay.aborted or {}
        self._relay.go_on()
        return await self._streamed(
            Rest(response.aiter_bytes(), like, reading.sampled_tokens, self._parts.retelling), self._relay
        )

    def _continues(self) -> bool:
        """Whether a reply that is broken off is continued, and not told as it is."""
        return self._call.served.wire is CHAT and self._upstream.pauses.continues_aborted(
            self._call.target.route.policy
        )

    def _aborted(self, reading: ParsedReply) -> CallReply | None:
        """The engine has broken the reply off: None where it goes on."""
        self._end_part(reading)
        try:
            left = self._parts.left(reading)
        except CannotContinueError as error:
            return _broken(reading, error, not_continued=True)
        if left is not None and left <= 0:
            return self._truncated()
        self._recorder.metrics.count("continued_replies")
        return None

    def _truncated(self) -> CallReply:
        """All that was asked for was sampled before the engine broke off."""
        if self._relay is None:
            self._body["choices"][0]["finish_reason"] = TRUNCATED
            return self._told(orjson.dumps(self._body), self._body)
        like = self._relay.aborted or {}
        self._relay.go_on()
        self._relay.tell(end_chunk(like))
        return CallReply(CallResult(CallStatus.OK, self._relay.reading(), OK), self._relay.held)

    def _end_part(self, reading: ParsedReply) -> None:
        route = self._call.target.route
        span = version_span(route, reading.weight_versions[-1:], self._version, self._version)
        self._parts.end_part(span.before, reading)

    def _labelled(self, outcome: CallReply) -> CallReply:
        """With the version of each part, where there are several."""
        if not self._parts.parts:
            return outcome
        self._end_part(outcome.ending.reading)
        metadata = {**outcome.ending.metadata, "parts": len(self._parts.parts)}
        return replace(outcome, ending=replace(outcome.ending, versions=self._parts.versions, metadata=metadata))

    def _reading(self) -> ParsedReply:
        """What was sampled so far."""
        served = self._call.served
        if self._relay is not None:
            return self._relay.reading()
        return ParsedReply() if self._body is None else served.wire.parse_body(self._body, served.prompt_ids)

    async def _asked(self, call: Call) -> CallReply | None:
        served = call.served
        try:
            upstream, name = self._upstream, call.completion_id
            async with upstream.chat(call.target, served.body, name, served.wire.path, call.session_id) as response:
                if response.status_code != OK:
                    return self._refused(response.status_code, response.headers, await response.aread())
                if self._relay is None:
                    return self._whole(await response.aread())
                return await self._streamed(response.aiter_bytes(), self._relay)
        except UpstreamError as error:
            return _unanswered(error)

    def _whole(self, raw: bytes) -> CallReply | None:
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return _broken(ParsedReply(incomplete="not_json"))
        if self._body is not None and error_of(body) is None:
            body = joined(self._body, body, self._parts.retelling)
            raw = orjson.dumps(body)
        if is_aborted(body) and self._continues():
            self._body = body
            return self._aborted(self._reading())
        return self._told(raw, body)

    def _told(self, raw: bytes, body: Any) -> CallReply:
        served = self._call.served
        reading = served.wire.parse_body(body, served.prompt_ids)
        if not reading.complete:
            return _broken(reading)
        shown = (
            as_stream(served.answer.stream_formatter(), body) if served.stream else served.answer.format_body(raw, body)
        )
        # The log's response has no details, whatever the client's has: they are in the record's arrays.
        stripped = shown if _strips(served) else orjson.dumps(without_details(body))
        reply = shown if served.stream else Response(shown, OK, media_type=JSON)
        return CallReply(CallResult(CallStatus.OK, reading, OK, response=stripped), reply)

    async def _streamed(self, pieces: AsyncIterator[bytes], relay: StreamRelay) -> CallReply | None:
        trouble: UpstreamError | None = None
        try:
            await self._pump(pieces, relay)
        except httpx.HTTPError as error:
            trouble = upstream_error(error, self._call.target)
        reading = relay.reading()
        if relay.aborted is not None:
            return self._aborted(reading)
        if not reading.complete:
            return _broken(reading, trouble)
        return CallReply(CallResult(CallStatus.OK, reading, OK), relay.held)

    async def _pump(self, pieces: AsyncIterator[bytes], relay: StreamRelay) -> None:
        """Forward until the body ends. After the last frame it is only read out, for a moment."""
        try:
            async with asyncio.timeout(None) as patience:
                async for piece in pieces:
                    await self._client.forward(relay.feed(piece))
                    if relay.over and patience.when() is None:
                        patience.reschedule(asyncio.get_running_loop().time() + AFTER_DONE_SECONDS)
        except TimeoutError:
            if not relay.over:
                raise

    async def _not_recorded(self, outcome: CallReply, error: Exception) -> None:
        """A reply must not look whole that the log does not have; an error may be told all the same."""
        self._complain(error)
        if outcome.ending.status is CallStatus.OK:
            message = f"the reply was not recorded, so it is withheld: {error}"
            await self._client.reply(ApiError(BAD_GATEWAY, message, retry=True))
        else:
            await self._client.reply(outcome.reply)

    def _refused(self, status: int, headers: httpx.Headers, body: bytes) -> CallReply:
        """The upstream's refusal is passed on: as it is, or in the shape of the caller's API where that is another."""
        answer, message = self._call.served.answer, _message(body)
        hints = {name: headers[name] for name in PASSED_ON if name in headers}
        reply = Response(body, status, hints, headers.get("content-type", JSON))
        if not isinstance(answer, PassthroughFormatter):
            reply = json_response(answer.error_format.error(status, message), status, hints)
        return CallReply(
            CallResult(CallStatus.ERROR, http_status=status, error=message, response=_as_json(body)), reply
        )

    def _complain(self, error: Exception) -> None:
        call = self._call
        structlog.get_logger().error(
            "a call was not recorded", session=call.session_id, completion=call.completion_id, error=str(error)
        )


def _strips(served: UpstreamRequest) -> bool:
    """What the client gets is what the log gets."""
    return (
        not served.stream and isinstance(served.answer, PassthroughFormatter) and served.answer.strip is without_details
    )


def _unanswered(error: UpstreamError) -> CallReply:
    status = CallStatus.INCOMPLETE if error.began else CallStatus.ERROR
    return CallReply(CallResult(status, error=str(error)), ApiError(error.status, str(error), retry=True))


def _broken(reading: ParsedReply, trouble: Exception | None = None, *, not_continued: bool = False) -> CallReply:
    """Status 200, and yet no whole reply. ``not_continued``: the engine broke it off; ``trouble`` is why it ends."""
    reading = replace(reading, incomplete=reading.incomplete or "no_terminal_frame")
    detail = reading.error or (str(trouble) if trouble is not None else "")
    message = f"{reading.incomplete}: {detail}" if detail else str(reading.incomplete)
    metadata = {"not_continued": str(trouble)} if not_continued else {}
    ending = CallResult(CallStatus.INCOMPLETE, reading, OK, error=message, metadata=metadata)
    return CallReply(ending, ApiError(BAD_GATEWAY, f"the upstream's reply is not whole ({message})", retry=True))


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
