"""One call, from the client's request to the acknowledged record: engine, parsed reply, record, answer (rule S4).

`CallHandler.handle` is the whole course of it. A reply that the engine breaks off for new weights is continued part by
part (`rollmill_capture.proxy.continuation`); all other calls have one part.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import orjson
import structlog
from starlette.responses import Response

from rollmill.errors import BackpressureError
from rollmill.models import CallStatus
from rollmill_capture.apis.openai import without_details
from rollmill_capture.errors import JSON, ApiError
from rollmill_capture.event_log.event_writer import NotAcknowledgedError
from rollmill_capture.model_config import EngineKind
from rollmill_capture.proxy.call_reply import OK, CallReply, incomplete, refused, unanswered
from rollmill_capture.proxy.continuation import (
    TRUNCATED,
    Continuation,
    ContinuedStream,
    end_chunk,
    is_aborted,
    join_bodies,
)
from rollmill_capture.proxy.reasoning_parser import CannotContinueError
from rollmill_capture.proxy.recorder import Call, CallResult, Recorder, RecordTooLargeError
from rollmill_capture.proxy.response_stream import ResponseStream, StreamRelay, as_stream, make_relay
from rollmill_capture.proxy.tokenization import LOOKED_UP, prompt_ids, sampled_text
from rollmill_capture.upstream.client import BAD_GATEWAY, Upstream, UpstreamError, upstream_error
from rollmill_capture.upstream.formats.parsed_reply import ParsedReply, error_of
from rollmill_capture.upstream.formats.upstream_format import CHAT, COMPLETIONS
from rollmill_capture.upstream.unusable import unusable

AFTER_DONE_SECONDS = 1.0
"""For the end of the body after the stream's last frame, so that the connection can be used again."""

_NOT_RECORDED = (NotAcknowledgedError, RecordTooLargeError)


class CallHandler:
    """Handles one call."""

    def __init__(
        self,
        call: Call,
        upstream: Upstream,
        recorder: Recorder,
        response: ResponseStream,
        keep_alive_seconds: float = 15.0,
    ) -> None:
        self._call = call
        self._upstream = upstream
        self._recorder = recorder
        self._response = response
        self._keep_alive_seconds = keep_alive_seconds
        self._relay = make_relay(call.request, self._continues) if call.request.engine_streams else None
        self._continuation = Continuation(call.request)
        self._version = call.announced
        self._body: Any = None
        """Of a whole reply, the beginning that the engine has broken off."""
        self._recording = False
        """The record is under way: from now on the client's leaving changes nothing."""

    async def handle(self) -> None:
        """Answer the client, whatever happens; a reply that ends normally is in the log before its end is sent.

        When the client leaves before its record is under way, the call is cancelled and what was sampled is recorded.
        """
        try:
            # From here on the record has a place, whatever becomes of Kafka (rule S5).
            with self._recorder.event_writer.reserve_space(self._call.request.record_bytes):
                work = asyncio.create_task(self._run())
                disconnect = asyncio.create_task(self._response.wait_disconnect())
                try:
                    await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
                    if not work.done() and not self._recording:
                        work.cancel()
                        await asyncio.wait((work,))
                        await self._record_disconnect()
                    else:
                        await work
                finally:
                    work.cancel()
                    disconnect.cancel()
        except BackpressureError as error:
            await self._reject(error)

    async def _run(self) -> None:
        reply = await self._first_part()
        while reply is None:
            reply = await self._next_part()
        reply = await self._with_prompt_ids(self._with_part_versions(reply))
        self._recording = True
        try:
            await self._recorder.record(self._call, reply.result)
        except _NOT_RECORDED as error:
            await self._reply_unrecorded(reply, error)
        else:
            if reply.result.status is CallStatus.OK:
                self._response.mark_settled()
            await self._response.reply(reply.reply)

    async def _first_part(self) -> CallReply | None:
        """None: the engine has broken the reply off, and it can be continued."""
        if self._call.request.client_streams:
            # A pause, a queue or a whole answer may take minutes, and readers of streams give up on silence.
            self._response.start_keepalive(self._keep_alive_seconds)
        async with self._upstream.pauses.in_flight(self._call.target.route.policy):
            # The version that counts is the one when the engine is asked, not the one when the call began to wait.
            call = self._call = self._recorder.start(self._call)
            request, self._version = call.request, call.announced
            try:
                async with self._upstream.chat(
                    call.target, request.body, call.completion_id, request.upstream_format.path, call.session_id
                ) as response:
                    if response.status_code != OK:
                        body = await self._upstream.read(response)
                        return refused(request.formatter, response, body)
                    if self._relay is None:
                        return self._read_body(await self._upstream.read(response), str(response.url))
                    return await self._read_stream(response.aiter_bytes(), self._relay, str(response.url))
            except UpstreamError as error:
                return unanswered(error)

    async def _next_part(self) -> CallReply | None:
        """The same for the rest of a reply; from here on whatever happens has to be recorded."""
        call, parsed = self._call, self._parsed()
        try:
            async with self._upstream.pauses.in_flight(call.target.route.policy):
                self._version = self._recorder.announced.newest(call.target.route.policy)
                await self._start_text_parser(parsed)
                body = self._continuation.request(parsed, self._recorder.cache_salt(call))
                name = f"{call.completion_id}-{len(self._continuation.parts)}"
                async with self._upstream.chat(call.target, body, name, COMPLETIONS.path, call.session_id) as response:
                    return await self._read_rest(response, parsed)
        except (UpstreamError, BackpressureError, CannotContinueError) as error:
            return incomplete(self._parsed(), error, not_continued=True)

    async def _start_text_parser(self, parsed: ParsedReply) -> None:
        """Where the rest has to be parsed, with the text of what was sampled, which the engine's tokenizer knows."""
        call = self._call
        if self._continuation.needs_text(parsed):
            ids = self._continuation.sampled_ids(parsed)
            text = await sampled_text(self._upstream, call.target, call.request, ids)
            self._continuation.start_text_parser(parsed, text, call.completion_id)

    async def _read_rest(self, response: httpx.Response, parsed: ParsedReply) -> CallReply | None:
        if response.status_code != OK:
            error = UpstreamError(f"its rest was refused with {response.status_code}", BAD_GATEWAY)
            return incomplete(parsed, error, not_continued=True)
        if self._relay is None:
            return self._read_body(await self._upstream.read(response), str(response.url))
        stream = ContinuedStream(
            response.aiter_bytes(), self._relay.aborted or {}, parsed.sampled_tokens, self._continuation.text_parser
        )
        self._relay.start_next_part()
        return await self._read_stream(stream, self._relay, str(response.url))

    def _read_body(self, raw: bytes, url: str) -> CallReply | None:
        """A whole answer of the engine."""
        request = self._call.request
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return incomplete(ParsedReply(incomplete="not_json"), unusable(url, raw))
        if self._body is not None and error_of(body) is None:
            body = join_bodies(self._body, body, self._continuation.text_parser)
            raw = orjson.dumps(body)
        if self._continues() and is_aborted(body):
            self._body = body
            return self._aborted(self._parsed())
        parsed = request.upstream_format.parse_body(body, request.prompt_ids)
        return self._whole_reply(parsed, raw, body) if parsed.complete else incomplete(parsed)

    def _whole_reply(self, parsed: ParsedReply, raw: bytes, body: Any) -> CallReply:
        request = self._call.request
        streams, formatter = request.client_streams, request.formatter
        shown = as_stream(formatter.stream_formatter(), body) if streams else formatter.format_body(raw, body)
        # The log's response has no details, whatever the client's has: they are in the record's arrays.
        kept = shown if request.strips_details else orjson.dumps(without_details(body))
        reply = shown if streams else Response(shown, OK, media_type=JSON)
        return CallReply(CallResult(CallStatus.OK, parsed, OK, response=kept), reply)

    async def _read_stream(self, pieces: AsyncIterator[bytes], relay: StreamRelay, url: str) -> CallReply | None:
        """Forward until the body ends. After the last frame it is only read out, for a moment."""
        failure: UpstreamError | None = None
        try:
            async with asyncio.timeout(None) as patience:
                async for piece in pieces:
                    await self._response.forward(relay.feed(piece))
                    if relay.over and patience.when() is None:
                        patience.reschedule(asyncio.get_running_loop().time() + AFTER_DONE_SECONDS)
        except TimeoutError:
            if not relay.over:
                raise
        except httpx.HTTPError as error:
            failure = upstream_error(error, self._call.target)
        parsed = relay.reading()
        if relay.aborted is not None:
            return self._aborted(parsed)
        if not parsed.complete:
            return incomplete(parsed, failure or unusable(url, relay.beginning_of(parsed)))
        return CallReply(CallResult(CallStatus.OK, parsed, OK), relay.held)

    def _continues(self) -> bool:
        """Whether a reply that is broken off is continued, and not returned as it is."""
        return self._call.request.upstream_format is CHAT and self._upstream.pauses.continues_aborted(
            self._call.target.route.policy
        )

    def _aborted(self, parsed: ParsedReply) -> CallReply | None:
        """The engine has broken the reply off: None where it goes on."""
        self._continuation.end_part(self._call.target.route, self._version, parsed)
        try:
            left = self._continuation.tokens_left(parsed)
        except CannotContinueError as error:
            return incomplete(parsed, error, not_continued=True)
        if left is not None and left <= 0:
            return self._truncated()
        self._recorder.metrics.count("continued_replies")
        return None

    def _truncated(self) -> CallReply:
        """All that was asked for was sampled before the engine broke off."""
        if self._relay is None:
            self._body["choices"][0]["finish_reason"] = TRUNCATED
            parsed, raw = self._parsed(), orjson.dumps(self._body)
            return self._whole_reply(parsed, raw, self._body) if parsed.complete else incomplete(parsed)
        like = self._relay.aborted or {}
        self._relay.start_next_part()
        self._relay.add_chunk(end_chunk(like))
        return CallReply(CallResult(CallStatus.OK, self._relay.reading(), OK), self._relay.held)

    def _with_part_versions(self, reply: CallReply) -> CallReply:
        """With the version of each part, where there are several."""
        continuation, result = self._continuation, reply.result
        if not continuation.parts:
            return reply
        continuation.end_part(self._call.target.route, self._version, result.parsed)
        metadata = {**result.metadata, "parts": len(continuation.parts)}
        return replace(reply, result=replace(result, versions=continuation.versions, metadata=metadata))

    async def _with_prompt_ids(self, reply: CallReply) -> CallReply:
        """With the prompt's ids, where the engine has them on a route of its own alone (llama.cpp).

        Without a count of the prompt's tokens to check them against, they are not worth a request.
        """
        call, result, parsed = self._call, reply.result, reply.result.parsed
        if call.request.engine is not EngineKind.LLAMA_CPP or call.request.upstream_format is not CHAT:
            return reply
        counted = parsed.usage is not None and parsed.usage[0] > 0
        sampled = any(choice.tokens for choice in parsed.choices)
        if result.status is not CallStatus.OK or parsed.prompt_ids is not None or not (counted and sampled):
            return reply
        parsed = replace(parsed, prompt_ids=await prompt_ids(self._upstream, call.target, call.request))
        return replace(reply, result=replace(result, parsed=parsed, metadata={**result.metadata, **LOOKED_UP}))

    def _parsed(self) -> ParsedReply:
        """What was sampled so far."""
        request = self._call.request
        if self._relay is not None:
            return self._relay.reading()
        return request.upstream_format.parse_body(self._body, request.prompt_ids) if self._body else ParsedReply()

    async def _record_disconnect(self) -> None:
        """The client has left, and the call upstream is cancelled: keep what was sampled until then."""
        result = CallResult(CallStatus.CLIENT_GONE, self._parsed(), error="the client left before its reply ended")
        try:
            await self._recorder.record(self._call, result)
        except _NOT_RECORDED as error:
            self._log_unrecorded(error)

    async def _reject(self, error: BackpressureError) -> None:
        """Before the engine was called: nothing was sampled, and there is nothing to record."""
        # The names of these errors are values of the label.
        self._recorder.metrics.count("turned_away", reason=type(error).__name__)
        await self._response.reply(ApiError(503, str(error), retry=True, retry_after=error.retry_after))

    async def _reply_unrecorded(self, reply: CallReply, error: Exception) -> None:
        """A reply that the log does not have must not look whole; an error may be passed on all the same."""
        self._log_unrecorded(error)
        status = 503 if isinstance(error, NotAcknowledgedError) else BAD_GATEWAY
        withheld = ApiError(status, f"the reply was not recorded, so it is withheld: {error}", retry=True)
        await self._response.reply(withheld if reply.result.status is CallStatus.OK else reply.reply)

    def _log_unrecorded(self, error: Exception) -> None:
        call = self._call
        structlog.get_logger().error(
            "a call was not recorded", session=call.session_id, completion=call.completion_id, error=str(error)
        )
