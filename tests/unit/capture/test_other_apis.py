"""Responses, Messages and Gemini through the whole application: held ends, errors, keep-alives, look-ups."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from rollmill.models import CallStatus, CompletionRecord, SessionEntry, SessionSpec, SessionState
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.http.canned_server import CannedRequest, CannedResponse, canned_server
from rollmill.testing.http.scripted_engine import END, ScriptedEngine, decode, encode, render
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.event_log.event_writer import NotAcknowledgedError
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.model_config import EngineKind, Route
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream, make_client

WIRE = Path(__file__).parents[2] / "fixtures" / "wire"
WAIT = 5.0
TEXT = "<think>hm</think>Yes."
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Face:
    """One API: where it is, a small request, and the frame that ends its streams normally."""

    path: str
    body: dict[str, Any]
    end: bytes
    stream: Callable[[dict[str, Any]], dict[str, Any]] = lambda body: {**body, "stream": True}
    stream_path: str | None = None


FACES = {
    "responses": Face("/v1/responses", {"model": "toy", "input": "hi"}, b"event: response.completed"),
    "messages": Face("/v1/messages", {"model": "toy", "max_tokens": 99, **HI}, b"event: message_delta"),
    "gemini": Face(
        "/v1beta/models/toy:generateContent",
        {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
        b"finishReason",
        lambda body: body,
        "/v1beta/models/toy:streamGenerateContent",
    ),
}


@dataclass
class Rig:
    app: Any
    asked: list[CannedRequest]
    event_writer: MemoryEventWriter = field(default_factory=MemoryEventWriter)

    def call(self, path: str, body: object, method: str = "POST", **headers: str) -> AsgiCall:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return AsgiCall(self.app, method, f"/sessions/s{path}", body, named)

    def ask(self, name: str, *, stream: bool) -> AsgiCall:
        face = FACES[name]
        if not stream:
            return self.call(face.path, face.body)
        call = self.call(face.stream_path or face.path, face.stream(face.body))
        call.query(b"alt=sse")
        return call

    @property
    def records(self) -> list[CompletionRecord]:
        return self.event_writer.of(COMPLETIONS)


@asynccontextmanager
async def rig(answer: Callable[[CannedRequest], CannedResponse], **settings: Any) -> AsyncIterator[Rig]:
    async with asyncio.timeout(WAIT), canned_server(answer) as engine:
        given = CaptureSettings(upstream=engine.url, **settings)
        async with make_client(given) as client:
            event_writer, sessions = MemoryEventWriter(), SessionTable()
            opened = SessionEntry(session_id="s", state=SessionState.OPEN, spec=SessionSpec(), opened_at=0.0)
            sessions.apply(opened)
            parts = CaptureParts(
                settings=given,
                sessions=sessions,
                position=CaughtUp(),
                announced=AnnouncedVersions(),
                event_writer=event_writer,
                upstream=Upstream(client),
                clock=ManualClock(),
                metrics=Metrics("capture"),
            )
            yield Rig(assemble(parts), engine.requests, event_writer)


@pytest.mark.parametrize("name", FACES)
async def test_the_end_waits_for_the_acknowledgement(name: str) -> None:
    async with rig(ScriptedEngine((TEXT,)).answer) as capture:
        capture.event_writer.open.clear()
        async with capture.ask(name, stream=True) as call:
            seen = await call.piece() or b""
            await capture.event_writer.asked.wait()
            while not call.waiting:
                seen += await call.piece() or b""
            assert FACES[name].end not in seen
            assert b"hm" in seen
            capture.event_writer.open.set()
            assert FACES[name].end in await call.rest()
        assert [record.status for record in capture.records] == [CallStatus.OK]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", FACES)
async def test_a_reply_that_the_log_did_not_take_never_ends_normally(name: str, stream: bool) -> None:
    async with rig(ScriptedEngine((TEXT,)).answer) as capture:
        capture.event_writer.failure = NotAcknowledgedError("no answer")
        async with capture.ask(name, stream=stream) as call:
            text = await call.rest()
        assert b"was not recorded" in text
        assert FACES[name].end not in text
        assert call.status == (200 if stream else 503)


@pytest.mark.parametrize("name", FACES)
async def test_a_stream_that_breaks_is_an_error_in_the_callers_shape(name: str) -> None:
    raw = (WIRE / "vllm_chat_stream_midstream_error.sse").read_bytes()
    async with rig(lambda _: CannedResponse.events(raw)) as capture:
        async with capture.ask(name, stream=True) as call:
            text = await call.rest()
        last = text.strip().split(b"\n\n")[-1]
        assert b'"error":{' in last
        assert FACES[name].end not in text
        assert [record.status for record in capture.records] == [CallStatus.INCOMPLETE]


@pytest.mark.parametrize("name", FACES)
async def test_a_refusal_of_the_engine_is_told_in_the_callers_shape(name: str) -> None:
    raw = (WIRE / "vllm_error_400_context.json").read_bytes()
    async with rig(lambda _: CannedResponse((raw,), 400)) as capture:
        async with capture.ask(name, stream=True) as call:
            body = await call.json()
        assert call.status == 400
        assert "maximum context length" in body["error"]["message"]
        kinds = {"responses": "type", "messages": "type", "gemini": "status"}
        kind = body["error"][kinds[name]]
        assert kind in {"invalid_request_error", "INVALID_ARGUMENT"}
        (record,) = capture.records
        assert (record.status, record.http_status) == (CallStatus.ERROR, 400)


@pytest.mark.parametrize("name", FACES)
async def test_what_no_engine_understands_is_refused_before_it_is_asked(name: str) -> None:
    bad = {"responses": {"input": 5}, "messages": {"messages": 5, "max_tokens": 1}, "gemini": {"contents": 5}}
    async with rig(ScriptedEngine((TEXT,)).answer) as capture:
        async with capture.call(FACES[name].path, bad[name]) as call:
            assert "list of objects" in (await call.json())["error"]["message"]
        assert (call.status, capture.asked) == (400, [])


async def test_an_unknown_session_is_told_in_the_callers_shape() -> None:
    async with rig(ScriptedEngine((TEXT,)).answer) as capture:
        async with AsgiCall(capture.app, "POST", "/sessions/none/v1/messages", FACES["messages"].body) as call:
            body = await call.json()
        assert (call.status, body["type"], body["error"]["type"]) == (404, "error", "not_found_error")


@pytest.mark.parametrize("name", FACES)
async def test_whole_and_streamed_replies_have_the_same_record(name: str) -> None:
    async with rig(ScriptedEngine((TEXT,)).answer) as capture:
        for stream in (False, True):
            async with capture.ask(name, stream=stream) as call:
                await call.rest()
        whole, streamed = capture.records
        assert whole.prompt_ids is not None
        assert decode(whole.prompt_ids.tolist()) == render(HI["messages"], ())
        pairs = [(record.prompt_ids, record.choices[0].token_ids) for record in (whole, streamed)]
        assert orjson.dumps([ids.tolist() for ids in pairs[0] if ids is not None]) == orjson.dumps(
            [ids.tolist() for ids in pairs[1] if ids is not None]
        )
        assert whole.metadata["api"] == name


async def test_gemini_without_events_is_a_list() -> None:
    async with rig(ScriptedEngine((TEXT,)).answer) as capture:
        async with capture.call("/v1beta/models/toy:streamGenerateContent", FACES["gemini"].body) as call:
            (only,) = await call.json()
        assert [part["text"] for part in only["candidates"][0]["content"]["parts"]] == ["hm", "Yes."]


async def test_a_stop_sequence_is_named() -> None:
    choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop", "stop_reason": "END"}
    async with rig(lambda _: CannedResponse.json({"choices": [choice], "usage": {}})) as capture:
        body = {**FACES["messages"].body, "stop_sequences": ["END"]}
        async with capture.call("/v1/messages", body) as call:
            answer = await call.json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        ("length", ("incomplete", "max_tokens", "MAX_TOKENS")),
        ("abort", ("incomplete", None, "OTHER")),
        ("content_filter", ("incomplete", "refusal", "SAFETY")),
    ],
)
async def test_other_ends_are_reported(finish: str, expected: tuple[str, str | None, str]) -> None:
    choice = {"index": 0, "message": {"content": "a"}, "finish_reason": finish}
    found: list[Any] = []
    async with rig(lambda _: CannedResponse.json({"choices": [choice], "usage": {}})) as capture:
        for name in FACES:
            async with capture.ask(name, stream=False) as call:
                found.append(await call.json())
    assert found[0]["status"] == expected[0]
    assert found[1]["stop_reason"] == expected[1]
    assert found[2]["candidates"][0]["finishReason"] == expected[2]


async def test_a_second_call_and_late_text_are_told_after_the_first_call() -> None:
    def frame(**choice: Any) -> bytes:
        return b"data: " + orjson.dumps({"choices": [{"index": 0, "finish_reason": None, **choice}]}) + b"\n\n"

    def call(index: int, **fields: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, **fields}]}

    pieces = [
        frame(delta=call(0, id="a", function={"name": "f", "arguments": '{"x":'})),
        frame(delta=call(1, id="b", function={"name": "g", "arguments": "{"})),
        frame(delta={"content": "late"}),
        frame(delta=call(0, function={"arguments": " 1}"})),
        frame(delta=call(1, function={"arguments": "}"})),
        frame(delta={}, finish_reason="tool_calls"),
        b"data: [DONE]\n\n",
    ]
    played = CannedResponse(tuple(pieces), content_type="text/event-stream")
    async with rig(lambda _: played) as capture, capture.ask("messages", stream=True) as answer:
        frames = (await answer.rest()).strip().split(b"\n\n")
        events = [orjson.loads(block.split(b"data: ")[1]) for block in frames]
    blocks: dict[int, list[str]] = {}
    order = []
    for event in events:
        order.append((event["type"], event.get("index")))
        if event["type"] == "content_block_delta":
            blocks.setdefault(event["index"], []).append(
                event["delta"].get("partial_json") or event["delta"].get("text") or ""
            )
    assert {index: "".join(texts) for index, texts in blocks.items()} == {0: '{"x": 1}', 1: "late", 2: "{}"}
    stops = [(kind, index) for kind, index in order if kind in ("content_block_start", "content_block_stop")]
    assert stops == [(f"content_block_{what}", index) for index in range(3) for what in ("start", "stop")]


@pytest.mark.parametrize("name", ["responses", "messages"])
async def test_a_silent_stream_is_kept_alive_while_the_engine_is_asked_for_a_whole_answer(name: str) -> None:
    answered = asyncio.Event()

    async def late(request: httpx.Request) -> httpx.Response:
        await answered.wait()
        played = ScriptedEngine((TEXT,)).answer(CannedRequest("POST", request.url.path, {}, request.content))
        return httpx.Response(200, content=b"".join(played.pieces))

    given = CaptureSettings(
        upstream="http://engine", keep_alive_seconds=0.01, default_route=Route(engine=EngineKind.SGLANG)
    )
    sessions = SessionTable()
    sessions.apply(SessionEntry(session_id="s", state=SessionState.OPEN, spec=SessionSpec(), opened_at=0.0))
    async with httpx.AsyncClient(transport=httpx.MockTransport(late)) as client, asyncio.timeout(WAIT):
        parts = CaptureParts(
            settings=given,
            sessions=sessions,
            position=CaughtUp(),
            announced=AnnouncedVersions(),
            event_writer=MemoryEventWriter(),
            upstream=Upstream(client),
            clock=ManualClock(),
            metrics=Metrics("capture"),
        )
        async with Rig(assemble(parts), []).ask(name, stream=True) as call:
            beat = await call.piece()
            assert beat in (b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n')
            assert await call.piece() == beat
            answered.set()
            assert FACES[name].end in await call.rest()


async def test_tokens_are_counted_by_the_engine_or_estimated_and_marked_so() -> None:
    async with rig(ScriptedEngine((TEXT,)).answer) as capture:
        async with capture.call("/v1/messages/count_tokens", HI) as call:
            assert await call.json() == {"input_tokens": len(encode(render(HI["messages"], ())))}
        assert "x-rollmill-estimated" not in call.headers
        async with capture.call("/v1beta/models/toy:countTokens", FACES["gemini"].body) as call:
            assert await call.json() == {"totalTokens": len(encode(render(HI["messages"], ())))}
    async with rig(lambda _: CannedResponse.json({}, 404)) as capture:
        async with capture.call("/v1/messages/count_tokens", HI) as call:
            assert (await call.json())["input_tokens"] > 0
        assert call.headers["x-rollmill-estimated"] == "true"
        async with capture.call("/v1/messages/count_tokens", {"messages": 5}) as call:
            assert (await call.json())["type"] == "error"
        assert (call.status, capture.records) == (400, [])


async def test_models_are_listed_in_each_apis_shape() -> None:
    async with rig(ScriptedEngine(()).answer) as capture:
        async with capture.call("/v1/models", None, "GET") as call:
            assert (await call.json())["data"][0]["id"] == "toy"
        async with capture.call("/v1/models", None, "GET", anthropic_version="2023-06-01") as call:
            assert (await call.json())["data"][0]["display_name"] == "toy"
        async with capture.call("/v1beta/models", None, "GET") as call:
            assert (await call.json())["models"][0]["name"] == "models/toy"


async def test_fields_that_a_route_gives_are_said_where_the_client_does_not_say_them() -> None:
    route = Route(defaults={"temperature": 0.5, "top_p": 1.0})
    async with rig(ScriptedEngine((TEXT,)).answer, default_route=route) as capture:
        async with capture.call("/v1/chat/completions", {**HI, "top_p": 0.9}) as call:
            await call.rest()
        (record,) = capture.records
        assert (capture.asked[0].body["temperature"], capture.asked[0].body["top_p"]) == (0.5, 0.9)
        assert (record.sampling.temperature, record.sampling.top_p) == (0.5, 0.9)
        assert "temperature" in record.metadata["added_fields"]


# B003
@pytest.mark.parametrize("stream", [True, False, None])
async def test_sglang_is_asked_for_whole_answers_and_its_client_gets_what_it_asked_for(stream: bool | None) -> None:
    raw = (WIRE / "sglang_chat_nonstream_meta_info.json").read_bytes()
    async with rig(lambda _: CannedResponse((raw,)), default_route=Route(engine=EngineKind.SGLANG)) as capture:
        async with capture.call("/v1/chat/completions", {**HI, "stream": stream}) as call:
            text = await call.rest()
        assert capture.asked[0].body.get("stream") in (False, None)
        (record,) = capture.records
        (choice,) = record.choices
        assert choice.token_ids is not None
        assert (choice.token_ids.tolist(), choice.trainable) == ([21, 22, 23, 24, 901], True)
        assert b"meta_info" not in text
        assert b"token_ids" not in text
        if not stream:
            assert orjson.loads(text)["choices"][0]["message"]["content"] == "It is 4."
            return
        assert call.headers["content-type"].startswith("text/event-stream")
        chunks = [orjson.loads(block[6:]) for block in text.strip().split(b"\n\n")[:-1]]
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "It is 4."
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert text.endswith(b"data: [DONE]\n\n")


# B003
async def test_a_whole_answer_that_is_told_as_a_stream_ends_with_the_usage_that_was_asked_for() -> None:
    raw = (WIRE / "sglang_chat_nonstream_meta_info.json").read_bytes()
    async with rig(lambda _: CannedResponse((raw,)), default_route=Route(engine=EngineKind.SGLANG)) as capture:
        body = {**HI, "stream": True, "stream_options": {"include_usage": True}}
        async with capture.call("/v1/chat/completions", body) as call:
            *chunks, done = (await call.rest()).strip().split(b"\n\n")
    last = orjson.loads(chunks[-1][6:])
    assert (last["choices"], done) == ([], b"data: [DONE]")
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (10, 5)


async def test_an_aborted_reply_of_ids_is_a_part() -> None:
    raw = (WIRE / "sglang_generate_abort_partial.json").read_bytes()
    async with rig(lambda _: CannedResponse((raw,))) as capture:
        async with capture.call("/generate", {"input_ids": [1, 2, 3]}) as call:
            body = await call.json()
        assert "output_token_logprobs" not in body["meta_info"]
        assert body["output_ids"] == [61, 62]
        assert capture.records[0].choices[0].untrainable_reason == "partial:abort"
        async with capture.call("/generate", {"input_ids": [[1], [2]]}) as call:
            assert "one by one" in (await call.json())["error"]["message"]


def like_llama_cpp(asked: CannedRequest) -> CannedResponse:
    """The ids of the reply in the log-probs, the prompt's on routes of their own."""
    body = asked.body
    if asked.path == "/apply-template":
        return CannedResponse.json({"prompt": render(body["messages"], ())})
    if asked.path == "/tokenize":
        return CannedResponse.json({"tokens": encode(body["content"])})
    played = ScriptedEngine((TEXT,)).answer(CannedRequest(asked.method, asked.path, asked.headers, orjson.dumps(body)))
    answer = orjson.loads(played.pieces[0])
    ids = [*encode(TEXT), END]
    for entry, number in zip(answer["choices"][0]["logprobs"]["content"], ids, strict=True):
        entry["id"] = number
    return CannedResponse.json(answer)


async def test_llama_cpp_is_asked_for_its_prompts_ids_beside_the_call() -> None:
    async with rig(like_llama_cpp, default_route=Route(engine=EngineKind.LLAMA_CPP)) as capture:
        async with capture.call("/v1/chat/completions", HI) as call:
            await call.rest()
        (record,) = capture.records
        assert record.prompt_ids is not None
        assert decode(record.prompt_ids.tolist()) == render(HI["messages"], ())
        assert record.choices[0].trainable
        assert record.metadata["prompt_ids_from"] == "tokenize"


# B034
async def test_the_prompt_is_rendered_from_all_that_the_call_was_asked_with() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": TOOL}}
    body = {**HI, "tools": [tool], "chat_template_kwargs": {"enable_thinking": False}}
    async with rig(like_llama_cpp, default_route=Route(engine=EngineKind.LLAMA_CPP)) as capture:
        async with capture.call("/v1/chat/completions", body) as call:
            await call.rest()
        asked = {item.path: item.body for item in capture.asked}
    assert asked["/apply-template"] == asked["/v1/chat/completions"]
    assert {name: asked["/apply-template"][name] for name in body} == body


async def test_ids_beside_the_call_that_are_not_as_many_as_it_had_are_not_trained() -> None:
    def other(asked: CannedRequest) -> CannedResponse:
        return CannedResponse.json({"tokens": [1, 2]}) if asked.path == "/tokenize" else like_llama_cpp(asked)

    async with rig(other, default_route=Route(engine=EngineKind.LLAMA_CPP)) as capture:
        async with capture.call("/v1/chat/completions", HI) as call:
            await call.rest()
        assert (capture.records[0].choices[0].untrainable_reason or "").startswith("prompt_ids(2)!=usage")


async def test_ids_beside_the_call_are_not_asked_for_where_no_count_could_check_them() -> None:
    def uncounted(asked: CannedRequest) -> CannedResponse:
        whole = orjson.loads(like_llama_cpp(asked).pieces[0])
        return CannedResponse.json({name: item for name, item in whole.items() if name != "usage"})

    async with rig(uncounted, default_route=Route(engine=EngineKind.LLAMA_CPP)) as capture:
        async with capture.call("/v1/chat/completions", HI) as call:
            await call.rest()
        (record,) = capture.records
        assert [item.path for item in capture.asked] == ["/v1/chat/completions"]
        assert (record.prompt_ids, record.choices[0].untrainable_reason) == (None, "prompt_ids_missing")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("wanted", "kept", "gone"),
    [
        ({"logprobs": True}, b'"logprob":', b"token_ids"),
        ({"return_token_ids": True}, b"token_ids", b'"logprob":'),
    ],
)
async def test_a_client_gets_of_the_details_what_it_asked_for(
    wanted: dict[str, Any], kept: bytes, gone: bytes, stream: bool
) -> None:
    async with rig(ScriptedEngine((TEXT,)).answer) as capture:
        async with capture.call("/v1/chat/completions", {**HI, **wanted, "stream": stream}) as call:
            text = await call.rest()
        assert kept in text
        assert gone not in text
        assert capture.records[0].choices[0].trainable
        assert gone not in (capture.records[0].response or b"")


async def test_one_model_is_found_or_not() -> None:
    async with rig(ScriptedEngine(()).answer) as capture:
        async with capture.call("/v1/models/toy", None, "GET") as call:
            assert (await call.json())["id"] == "toy"
        async with capture.call("/v1/models/org/other", None, "GET") as call:
            await call.rest()
        assert call.status == 404
