"""Chat completions through the whole HTTP application, with an engine that plays what a test gives it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette

from rollmill.models import (
    CallKind,
    CallStatus,
    CompletionRecord,
    PolicyAnnouncement,
    PolicyVersion,
    SessionEntry,
    SessionSpec,
    SessionState,
)
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.event_log.event_writer import NotAcknowledgedError
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.model_config import Route, VersionSource
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream

WIRE = Path(__file__).parents[2] / "fixtures" / "wire"
WAIT = 5.0
ASK = {"model": "m-test", "messages": [{"role": "user", "content": "2+2?"}], "temperature": 0.7, "top_p": 1}
STREAM = {**ASK, "stream": True}
CHAT = "/sessions/s1/v1/chat/completions"


@dataclass
class Rig:
    """Capture with one open session, an engine and a log."""

    answer: Callable[[httpx.Request], httpx.Response]
    settings: CaptureSettings = field(default_factory=lambda: CaptureSettings(upstream="http://engine/v1"))
    event_writer: MemoryEventWriter = field(default_factory=MemoryEventWriter)
    announced: AnnouncedVersions = field(default_factory=AnnouncedVersions)
    asked: list[httpx.Request] = field(default_factory=list)
    sessions: SessionTable = field(default_factory=SessionTable)

    def __post_init__(self) -> None:
        self.sessions.apply(entry("s1"))
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.app: Starlette = assemble(
            CaptureParts(
                settings=self.settings,
                sessions=self.sessions,
                position=CaughtUp(),
                announced=self.announced,
                event_writer=self.event_writer,
                upstream=Upstream(client),
                clock=ManualClock(),
                metrics=Metrics("capture"),
            )
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self.answer(request)

    def call(self, body: object = ASK, path: str = CHAT, **headers: str) -> AsgiCall:
        return AsgiCall(self.app, "POST", path, body, {key.replace("_", "-"): value for key, value in headers.items()})

    @property
    def records(self) -> list[CompletionRecord]:
        return self.event_writer.of(COMPLETIONS)

    @property
    def served(self) -> dict[str, Any]:
        body: dict[str, Any] = orjson.loads(self.asked[-1].content)
        return body


def entry(session_id: str, state: SessionState = SessionState.OPEN) -> SessionEntry:
    return SessionEntry(session_id=session_id, attempt=2, state=state, spec=SessionSpec(), opened_at=1.0)


def plays(name: str, status: int = 200) -> Callable[[httpx.Request], httpx.Response]:
    raw = (WIRE / name).read_bytes()
    kind = "text/event-stream" if name.endswith(".sse") else "application/json"
    return lambda _: httpx.Response(status, headers={"content-type": kind}, stream=Pieces([raw]))


@dataclass
class Pieces(httpx.AsyncByteStream):
    """A body in pieces. ``after`` is waited for before the piece of that number; ``breaks`` ends it with an error."""

    pieces: list[bytes]
    after: dict[int, asyncio.Event] = field(default_factory=dict)
    breaks: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for number, piece in enumerate(self.pieces):
            if number in self.after:
                await self.after[number].wait()
            yield piece
        if self.breaks:
            raise httpx.ReadError("connection reset")

    async def aclose(self) -> None:
        self.closed.set()


def frames(name: str) -> list[bytes]:
    return [block + b"\n\n" for block in (WIRE / name).read_bytes().split(b"\n\n") if block.strip()]


def streams(body: Pieces) -> Callable[[httpx.Request], httpx.Response]:
    return lambda _: httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=body)


async def test_a_whole_reply_is_recorded_and_the_client_gets_what_it_asked_for() -> None:
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"))
    async with rig.call(idempotency_key="retry-1") as call, asyncio.timeout(WAIT):
        body = await call.json()
    assert call.status == 200
    assert body["choices"][0]["message"]["content"] == "It is 4."
    assert "prompt_token_ids" not in body
    assert "token_ids" not in body["choices"][0]
    (record,) = rig.records
    assert (record.session_id, record.attempt, record.status, record.kind) == ("s1", 2, CallStatus.OK, CallKind.AGENT)
    assert record.prompt_ids is not None
    assert record.prompt_ids.tolist() == [900, 903, 902, 11, 12, 901, 902, 900, 904, 902]
    (choice,) = record.choices
    assert choice.token_ids is not None
    assert choice.token_ids.tolist() == [21, 22, 23, 24, 901]
    assert choice.logprobs is not None
    assert choice.logprobs.tolist() == pytest.approx([-0.11, -0.02, -0.35, -0.01, -0.003])
    assert (choice.trainable, choice.finish_reason) == (True, "stop")
    assert (record.usage_completion_tokens, record.model) == (5, "m-test")
    assert (record.sampling.temperature, record.sampling.top_p, record.sampling.top_k) == (0.7, 1.0, None)
    assert record.metadata["idempotency_key"] == "retry-1"
    assert b"token_ids" not in (record.response or b"")
    assert orjson.loads(choice.message or b"")["content"] == "It is 4."


async def test_the_engine_is_asked_for_ids_and_logprobs_and_nothing_of_the_client_changes() -> None:
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"))
    async with rig.call({**ASK, "seed": 3, "odd": {"a": None}}) as call, asyncio.timeout(WAIT):
        await call.rest()
    assert rig.served == {**ASK, "seed": 3, "odd": {"a": None}, "return_token_ids": True, "logprobs": True}
    assert str(rig.asked[0].url) == "http://engine/v1/chat/completions"
    (record,) = rig.records
    assert rig.asked[0].headers["x-request-id"] == record.completion_id
    assert record.original_request is None
    assert record.metadata["added_fields"] == ["return_token_ids", "logprobs"]


async def test_a_clients_own_wishes_are_kept_with_the_record_where_capture_overrules_them() -> None:
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"))
    async with rig.call({**ASK, "logprobs": False}) as call, asyncio.timeout(WAIT):
        await call.rest()
    (record,) = rig.records
    assert orjson.loads(record.original_request or b"")["logprobs"] is False
    assert rig.served["logprobs"] is True


async def test_a_client_that_asks_for_ids_and_logprobs_gets_the_engines_bytes() -> None:
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"))
    async with rig.call({**ASK, "logprobs": True, "return_token_ids": True}) as call, asyncio.timeout(WAIT):
        assert await call.rest() == (WIRE / "vllm_chat_nonstream_token_ids.json").read_bytes()


# B007
async def test_a_stream_gives_the_same_record_as_a_whole_reply() -> None:
    rig = Rig(plays("vllm_chat_stream_basic.sse"))
    whole = Rig(plays("vllm_chat_nonstream_token_ids.json"))
    async with rig.call(STREAM) as call, whole.call() as other, asyncio.timeout(WAIT):
        text = await call.rest()
        await other.rest()
    assert call.headers["content-type"].startswith("text/event-stream")
    assert text.endswith(b"data: [DONE]\n\n")
    assert b"token_ids" not in text
    (record,), (twin,) = rig.records, whole.records
    assert rig.served["stream_options"] == {"include_usage": True}
    assert record.replace(completion_id="x", request=None, response=None, choices=(), metadata={}) == twin.replace(
        completion_id="x", request=None, response=None, choices=(), metadata={}
    )
    assert record.choices[0].replace(message=None) == twin.choices[0].replace(message=None)


async def test_frames_pass_at_once_and_the_end_waits_for_the_acknowledgement() -> None:
    body = Pieces(frames("vllm_chat_stream_basic.sse"))
    rig = Rig(streams(body))
    rig.event_writer.open.clear()
    async with rig.call(STREAM) as call, asyncio.timeout(WAIT):
        first = await call.piece()
        assert first is not None
        await rig.event_writer.asked.wait()
        seen = first + b"".join([await call.piece() or b"" for _ in range(2)])
        assert b'"finish_reason":"stop"' not in seen
        assert rig.records == []
        rig.event_writer.open.set()
        rest = await call.rest()
    assert b'"finish_reason":"stop"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    assert len(rig.records) == 1


async def test_a_frame_reaches_the_client_before_the_engine_sends_the_next() -> None:
    more = asyncio.Event()
    rig = Rig(streams(Pieces(frames("vllm_chat_stream_basic.sse"), after={1: more})))
    async with rig.call(STREAM) as call, asyncio.timeout(WAIT):
        assert b'"role":"assistant"' in (await call.piece() or b"")
        more.set()
        assert (await call.rest()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("body", [ASK, STREAM])
async def test_a_reply_that_the_log_did_not_take_never_ends_normally(body: dict[str, Any]) -> None:
    name = "vllm_chat_stream_basic.sse" if "stream" in body else "vllm_chat_nonstream_token_ids.json"
    rig = Rig(plays(name))
    rig.event_writer.failure = NotAcknowledgedError("no answer")
    async with rig.call(body) as call, asyncio.timeout(WAIT):
        text = await call.rest()
    assert b"was not recorded" in text
    assert b"[DONE]" not in text
    assert b'"finish_reason":"stop"' not in text


# B018
@pytest.mark.parametrize(
    ("name", "why", "ids"),
    [
        ("vllm_chat_stream_cut.sse", "no_terminal_frame", [21]),
        ("vllm_chat_stream_midstream_error.sse", "error_frame", [21]),
        ("gateway_stream_flat_error.sse", "error_frame", [21]),
        ("gateway_200_not_sse.sse", "not_sse", None),
    ],
)
async def test_a_stream_that_is_no_whole_reply_is_incomplete_and_an_error(
    name: str, why: str, ids: list[int] | None
) -> None:
    rig = Rig(plays(name))
    async with rig.call(STREAM) as call, asyncio.timeout(WAIT):
        text = await call.rest()
    assert b'"error":{' in text
    assert b"[DONE]" not in text
    assert call.status == (502 if ids is None else 200)
    (record,) = rig.records
    assert record.status is CallStatus.INCOMPLETE
    assert (record.error or "").startswith(why)
    found = [choice.token_ids.tolist() for choice in record.choices if choice.token_ids is not None]
    assert found == ([] if ids is None else [ids])
    assert not any(choice.trainable for choice in record.choices)


async def test_a_whole_reply_that_breaks_off_is_incomplete_because_something_was_sampled() -> None:
    rig = Rig(streams(Pieces([b'{"choices": [', b"{"], breaks=True)))
    async with rig.call() as call, asyncio.timeout(WAIT):
        assert "connection reset" in (await call.json())["error"]["message"]
    assert (call.status, [record.status for record in rig.records]) == (502, [CallStatus.INCOMPLETE])
    assert len(rig.asked) == 1


async def test_a_connection_that_breaks_in_a_stream_is_an_error() -> None:
    rig = Rig(streams(Pieces(frames("vllm_chat_stream_basic.sse")[:2], breaks=True)))
    async with rig.call(STREAM) as call, asyncio.timeout(WAIT):
        assert b'"error":{' in await call.rest()
    assert rig.records[0].status is CallStatus.INCOMPLETE
    assert "connection reset" in (rig.records[0].error or "")


@pytest.mark.parametrize("raw", [b"<html>502</html>", b"{}", b'{"choices": []}', b'{"error": {"message": "x"}}', b"[]"])
async def test_status_200_without_a_reply_is_an_error(raw: bytes) -> None:
    rig = Rig(lambda _: httpx.Response(200, content=raw))
    async with rig.call() as call, asyncio.timeout(WAIT):
        assert "not whole" in (await call.json())["error"]["message"]
    assert call.status == 502
    assert rig.records[0].status is CallStatus.INCOMPLETE


async def test_a_refusal_of_the_engine_is_recorded_and_passed_on_as_it_is() -> None:
    rig = Rig(plays("vllm_error_400_context.json", 400))
    async with rig.call(STREAM) as call, asyncio.timeout(WAIT):
        assert await call.rest() == (WIRE / "vllm_error_400_context.json").read_bytes()
    assert call.status == 400
    (record,) = rig.records
    assert (record.status, record.http_status, record.choices) == (CallStatus.ERROR, 400, ())
    assert "maximum context length" in (record.error or "")


@pytest.mark.parametrize(("error", "status"), [(httpx.ConnectError("refused"), 502), (httpx.ReadTimeout("slow"), 504)])
async def test_an_engine_that_does_not_answer_is_recorded_too(error: Exception, status: int) -> None:
    def fails(_: httpx.Request) -> httpx.Response:
        raise error

    rig = Rig(fails)
    async with rig.call() as call, asyncio.timeout(WAIT):
        assert (await call.json())["error"]["code"] == status
    assert (rig.records[0].status, rig.records[0].http_status) == (CallStatus.ERROR, None)


# B010
async def test_a_pooled_connection_that_the_server_had_closed_is_tried_again_once() -> None:
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"))
    good = rig.answer

    def first_fails(request: httpx.Request) -> httpx.Response:
        if len(rig.asked) == 1:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return good(request)

    rig.answer = first_fails
    async with rig.call() as call, asyncio.timeout(WAIT):
        assert (await call.json())["choices"]
    assert (len(rig.asked), len(rig.records)) == (2, 1)


async def test_a_client_that_leaves_cancels_the_engines_call_and_its_part_is_recorded() -> None:
    never = asyncio.Event()
    body = Pieces(frames("vllm_chat_stream_basic.sse"), after={2: never})
    rig = Rig(streams(body))
    async with rig.call(STREAM) as call, asyncio.timeout(WAIT):
        await call.piece()
        await call.piece()
        call.leave()
        await body.closed.wait()
        await call.ended()
    (record,) = rig.records
    assert record.status is CallStatus.CLIENT_GONE
    assert record.choices[0].untrainable_reason == "client_gone"
    assert record.choices[0].token_ids is not None
    assert len(record.choices[0].token_ids) > 0


async def test_a_client_that_leaves_while_its_record_is_under_way_changes_nothing() -> None:
    rig = Rig(plays("vllm_chat_stream_basic.sse"))
    rig.event_writer.open.clear()
    async with rig.call(STREAM) as call, asyncio.timeout(WAIT):
        await rig.event_writer.asked.wait()
        call.leave()
        rig.event_writer.open.set()
        await call.ended()
    assert [record.status for record in rig.records] == [CallStatus.OK]


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/chat/completions", {"x_session_id": "s1"}),
        ("/v1/chat/completions", {"authorization": "Bearer s1"}),
        (CHAT, {"authorization": "Bearer none"}),
    ],
)
async def test_path_header_and_key_name_the_session(path: str, headers: dict[str, str]) -> None:
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"))
    async with rig.call(ASK, path, **headers) as call, asyncio.timeout(WAIT):
        await call.rest()
    assert (call.status, rig.records[0].session_id) == (200, "s1")


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/sessions/nobody/v1/chat/completions", 404, "POST /v1/sessions"),
        ("/sessions/not%20an%20id/v1/chat/completions", 404, "no session"),
        ("/sessions/done/v1/chat/completions", 409, "closed"),
        ("/v1/chat/completions", 401, "the session of this call"),
    ],
)
async def test_calls_without_an_open_session_are_refused_and_not_retried(path: str, status: int, words: str) -> None:
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"))
    rig.sessions.apply(entry("done", SessionState.CLOSED))
    async with rig.call(ASK, path) as call, asyncio.timeout(WAIT):
        error = (await call.json())["error"]
    assert (call.status, error["code"]) == (status, status)
    assert words in error["message"]
    assert call.headers["x-should-retry"] == "false"
    assert rig.asked == []


@pytest.mark.parametrize(
    "body",
    [b"{not json", b"[]", {"model": "m"}, {**ASK, "stream": "yes"}, {**ASK, "n": 0.5}, {**ASK, "stream_options": 1}],
)
async def test_a_malformed_body_is_refused_in_openais_shape(body: object) -> None:
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"))
    async with rig.call(body) as call, asyncio.timeout(WAIT):
        error = (await call.json())["error"]
    assert (call.status, error["type"]) == (400, "invalid_request_error")


async def test_a_body_over_the_limit_is_refused() -> None:
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"), CaptureSettings(request_bytes=10))
    async with rig.call() as call, asyncio.timeout(WAIT):
        await call.rest()
    assert call.status == 413


async def test_auxiliary_calls_are_marked_and_other_words_refused() -> None:
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"))
    async with rig.call(x_rollmill_call="aux") as aux, rig.call(x_rollmill_call="judge") as odd:
        await asyncio.wait_for(aux.rest(), WAIT)
        await asyncio.wait_for(odd.rest(), WAIT)
    assert [record.kind for record in rig.records] == [CallKind.AUX]
    assert odd.status == 400


async def test_a_route_says_what_its_calls_are_and_a_header_goes_before_it() -> None:
    routes = {"judge": Route(kind=CallKind.AUX)}
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"), CaptureSettings(routes=routes))
    for model, headers in (("judge", {}), ("m-test", {}), ("judge", {"x_rollmill_call": "agent"})):
        async with rig.call({**ASK, "model": model}, **headers) as call, asyncio.timeout(WAIT):
            await call.rest()
    assert [record.kind for record in rig.records] == [CallKind.AUX, CallKind.AGENT, CallKind.AGENT]


async def test_a_reply_whose_ids_alone_do_not_fit_is_withheld_and_counted() -> None:
    tokens = COMPLETIONS.max_bytes // 4
    choice = {"index": 0, "message": {}, "finish_reason": "stop", "token_ids": [7] * tokens}
    body = {"choices": [choice], "prompt_token_ids": [1], "usage": {"completion_tokens": tokens}}
    rig = Rig(lambda _: httpx.Response(200, content=orjson.dumps(body)))
    async with rig.call() as call, asyncio.timeout(WAIT):
        assert "is over" in (await call.json())["error"]["message"]
    (record,) = rig.records
    assert (call.status, record.status, record.error) == (502, CallStatus.INCOMPLETE, "too_large")
    assert record.usage_completion_tokens == tokens


async def test_the_engines_word_on_its_weights_is_the_version() -> None:
    rig = Rig(plays("sglang_chat_nonstream_meta_info.json"))
    rig.announced.apply("policy", PolicyAnnouncement(version=PolicyVersion(3, 11), at=1.0))
    async with rig.call() as call, asyncio.timeout(WAIT):
        await call.rest()
    assert rig.records[0].policy.before == rig.records[0].policy.after == PolicyVersion(3, 12)


async def test_without_the_engines_word_the_announced_versions_before_and_after_count() -> None:
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"))
    good = rig.answer

    def announces(request: httpx.Request) -> httpx.Response:
        rig.announced.apply("policy", PolicyAnnouncement(version=PolicyVersion(0, 5), at=1.0))
        return good(request)

    rig.answer = announces
    async with rig.call() as call, asyncio.timeout(WAIT):
        await call.rest()
    assert (rig.records[0].policy.before, rig.records[0].policy.after) == (PolicyVersion(0, 0), PolicyVersion(0, 5))


async def test_a_models_route_decides_upstream_name_version_and_whether_it_is_trained() -> None:
    judge = Route(
        upstream="http://judge:9/",
        model="judge-70b",
        policy="judge",
        version_source=VersionSource.FIXED,
        version=PolicyVersion(1, 4),
        trainable=False,
    )
    rig = Rig(plays("vllm_chat_nonstream_token_ids.json"), CaptureSettings(routes={"judge": judge}))
    async with rig.call({**ASK, "model": "judge"}) as call, asyncio.timeout(WAIT):
        await call.rest()
    assert str(rig.asked[0].url) == "http://judge:9/v1/chat/completions"
    assert rig.served["model"] == "judge-70b"
    (record,) = rig.records
    assert (record.policy.name, record.policy.before) == ("judge", PolicyVersion(1, 4))
    assert record.choices[0].untrainable_reason == "route_not_trainable"


def test_two_trained_policies_in_one_run_are_refused() -> None:
    with pytest.raises(ValueError, match="one run trains"):
        CaptureSettings(routes={"b": Route(policy="other")})


async def test_models_are_the_upstreams() -> None:
    rig = Rig(lambda _: httpx.Response(200, json={"object": "list", "data": []}))
    async with AsgiCall(rig.app, "GET", "/sessions/s1/v1/models") as call, asyncio.timeout(WAIT):
        assert await call.json() == {"object": "list", "data": []}
    assert rig.records == []
