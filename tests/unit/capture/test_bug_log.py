"""What has gone wrong in the field, with its input and the right output, through the whole HTTP application.

| row | test |
|---|---|
| B001, B005 | counters and one warning per kind |
| B004 | no reply is trained on a prompt that nobody said, or on an empty one |
| B008, B035 | a refusal between two replies; nothing of a request is rewritten |
| B009 | the four ways of saying ``stream`` |
| B014 | effective values of sampling |
| B021 | alternatives of the wrong token are not kept |
| B025, B026, B027 | calls that a parser lost, or that are none |
| B033 | a prompt of ids that was tokenised again |
| B042 | thoughts in a history reach the engine, by either name |

The other rows of these kinds are in the modules of what they are about: engine formats and wire samples (B002, B003,
B006, B007, B015, B016, B018, B019, B020, B023, B024, B046, B047, B048), other APIs (B003, B034), lanes and transport
(B010), identity (B013), weight updates (B051, B069, B075, B077, B078), admission (B070, B071, B072), a thousand calls
(B011, integration).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import structlog

from rollmill.models import CallStatus, CompletionRecord, SessionEntry, SessionSpec, SessionState
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.model_config import EngineKind, Route
from rollmill_capture.proxy.reasoning_parser import read_text
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream

WIRE = Path(__file__).parents[2] / "fixtures" / "wire"
WAIT = 5.0
ASK: dict[str, Any] = {"model": "m-test", "messages": [{"role": "user", "content": "2+2?"}]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]

Answer = Callable[[dict[str, Any]], httpx.Response]


@dataclass
class Rig:
    """Capture with one open session; ``answer`` is the engine, asked with a body."""

    answer: Answer
    settings: CaptureSettings = field(default_factory=CaptureSettings)
    event_writer: MemoryEventWriter = field(default_factory=MemoryEventWriter)
    metrics: Metrics = field(default_factory=lambda: Metrics("capture"))
    asked: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        sessions = SessionTable()
        sessions.apply(SessionEntry(session_id="s", state=SessionState.OPEN, spec=SessionSpec(), opened_at=0.0))
        self.app = assemble(
            CaptureParts(
                settings=self.settings,
                sessions=sessions,
                position=CaughtUp(),
                announced=AnnouncedVersions(),
                event_writer=self.event_writer,
                upstream=Upstream(httpx.AsyncClient(transport=httpx.MockTransport(self._answer))),
                clock=ManualClock(),
                metrics=self.metrics,
            )
        )

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.content)
        return self.answer(orjson.loads(request.content))

    async def call(self, body: object = ASK, path: str = "/v1/chat/completions") -> tuple[int, bytes, str]:
        """Status, body and media type of the reply."""
        async with asyncio.timeout(WAIT), AsgiCall(self.app, "POST", f"/sessions/s{path}", body) as call:
            text = await call.rest()
        return call.status, text, call.headers["content-type"].partition(";")[0]

    @property
    def records(self) -> list[CompletionRecord]:
        return self.event_writer.of(COMPLETIONS)

    @property
    def served(self) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads(self.asked[-1])
        return found


def plays(name: str, status: int = 200) -> httpx.Response:
    kind = "text/event-stream" if name.endswith(".sse") else "application/json"
    return httpx.Response(status, headers={"content-type": kind}, content=(WIRE / name).read_bytes())


def reply(message: dict[str, Any], ids: list[int], **choice: Any) -> dict[str, Any]:
    content = [{"token": "", "logprob": -0.5} for _ in ids]
    whole = {"index": 0, "message": message, "token_ids": ids, "logprobs": {"content": content}, **choice}
    usage = {"prompt_tokens": 3, "completion_tokens": len(ids)}
    return {"prompt_token_ids": [1, 2, 3], "choices": [{"finish_reason": "stop", **whole}], "usage": usage}


def always(body: dict[str, Any]) -> Answer:
    return lambda _: httpx.Response(200, json=body)


async def test_replies_without_ids_are_counted_and_told_once() -> None:
    rig = Rig(lambda _: plays("sglang_chat_nonstream_no_ids.json"))
    with structlog.testing.capture_logs() as logs:
        for _ in range(5):
            await rig.call()
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert [(line["reason"], line["upstream"]) for line in warnings] == [("no_ids", "http://127.0.0.1:8000/v1")]
    shown = rig.metrics.exposition()
    assert b'ids_missing_total{component="capture",prefix=""} 5.0' in shown
    assert b'ids_missing_ratio{component="capture",prefix=""} 1.0' in shown
    assert b'calls_total{component="capture",kind="agent",prefix="",status="ok"} 5.0' in shown


async def test_ids_that_a_parser_has_swallowed_are_counted() -> None:
    rig = Rig(lambda _: plays("vllm_chat_stream_tokens_swallowed.sse"))
    await rig.call({**ASK, "stream": True})
    assert rig.records[0].choices[0].untrainable_reason == "captured_ids(3)!=usage.completion_tokens(9)"
    assert b'untrainable_replies_total{component="capture",prefix="",reason="captured_ids"} 1.0' in (
        rig.metrics.exposition()
    )


@pytest.mark.parametrize("said", [{}, {"prompt_token_ids": None}, {"prompt_token_ids": []}])
@pytest.mark.parametrize("usage", [{"prompt_tokens": 10, "completion_tokens": 2}, {"completion_tokens": 2}, None])
async def test_a_reply_whose_prompt_nobody_says_is_not_trained(said: dict[str, Any], usage: Any) -> None:
    body = reply({"content": "4"}, [21, 901])
    del body["prompt_token_ids"]
    rig = Rig(always({**body, **said, "usage": usage}))
    await rig.call()
    (record,) = rig.records
    assert (record.prompt_ids, record.choices[0].untrainable_reason) == (None, "prompt_ids_missing")
    assert record.choices[0].token_ids is not None
    assert record.choices[0].token_ids.tolist() == [21, 901]


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_an_empty_prompt_of_ids_is_none(path: str) -> None:
    chat = {**reply({"content": "4"}, [9]), "prompt_token_ids": None, "usage": {"completion_tokens": 1}}
    meta = {"completion_tokens": 1, "output_token_logprobs": [[-0.5, 9, None]], "finish_reason": {"type": "stop"}}
    native = {"text": "4", "output_ids": [9], "meta_info": meta}
    settings = CaptureSettings(default_route=Route(engine=EngineKind.SGLANG))
    rig = Rig(always(native if path == "/generate" else chat), settings)
    assert (await rig.call({**ASK, "input_ids": []}, path))[0] == 200
    (record,) = rig.records
    assert (record.prompt_ids, record.choices[0].untrainable_reason) == (None, "prompt_ids_missing")


async def test_vllms_route_of_ids_takes_no_empty_prompt() -> None:
    rig = Rig(always(reply({}, [9])))
    status, text, _ = await rig.call({"token_ids": [], "sampling_params": {}}, "/inference/v1/generate")
    assert (status, rig.asked) == (400, [])
    assert b"token_ids" in text


async def test_a_refusal_between_two_replies_leaves_no_row_without_tokens() -> None:
    def answer(body: dict[str, Any]) -> httpx.Response:
        if body.get("max_tokens") == 10**6:
            return plays("vllm_error_400_context.json", 400)
        return plays("vllm_chat_nonstream_token_ids.json")

    rig = Rig(answer)
    for body in (ASK, {**ASK, "max_tokens": 10**6}, ASK):
        await rig.call(body)
    found = [(record.status, record.http_status, len(record.choices)) for record in rig.records]
    assert found == [(CallStatus.OK, 200, 1), (CallStatus.ERROR, 400, 0), (CallStatus.OK, 200, 1)]
    assert all(choice.token_ids is not None and len(choice.token_ids) for r in rig.records for choice in r.choices)


async def test_arguments_in_a_history_are_not_rewritten_and_a_refusal_is_asked_for_once() -> None:
    arguments = '{"city":  "Oslo",\n "n": 1.0}'
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    body = {**ASK, "messages": [*ASK["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    rig = Rig(lambda _: plays("vllm_error_400_context.json", 400))
    status, _, _ = await rig.call(body)
    assert (status, len(rig.asked), [record.status for record in rig.records]) == (400, 1, [CallStatus.ERROR])
    assert rig.served["messages"] == body["messages"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thoughts_in_a_history_reach_the_engine_under_their_name(name: str) -> None:
    said = {"role": "assistant", "content": "a", name: "need"}
    rig = Rig(lambda _: plays("vllm_chat_nonstream_token_ids.json"))
    await rig.call({**ASK, "messages": [*ASK["messages"], said, {"role": "user", "content": "go on"}]})
    assert rig.served["messages"][1] == said


async def test_the_four_ways_to_say_stream_have_one_record() -> None:
    def answer(body: dict[str, Any]) -> httpx.Response:
        return plays("vllm_chat_stream_basic.sse" if body.get("stream") else "vllm_chat_nonstream_token_ids.json")

    rig = Rig(answer)
    told = [await rig.call({**ASK, **said}) for said in ({"stream": True}, {"stream": False}, {"stream": None}, {})]
    assert [kind for _, _, kind in told] == ["text/event-stream", *["application/json"] * 3]
    assert told[0][1].endswith(b"data: [DONE]\n\n")
    assert all("choices" in orjson.loads(text) for _, text, _ in told[1:])
    first, *others = [record.choices[0].replace(message=None) for record in rig.records]
    assert all(choice == first for choice in others)
    assert {orjson.loads(record.choices[0].message or b"")["content"] for record in rig.records} == {"It is 4."}
    assert len({bytes(record.prompt_ids) for record in rig.records if record.prompt_ids is not None}) == 1


async def test_whole_numbers_of_googles_sdk_are_whole_numbers() -> None:
    rig = Rig(lambda _: plays("vllm_chat_nonstream_token_ids.json"))
    config = {"temperature": 0.5, "topK": 40.0}
    await rig.call(
        {"contents": [{"parts": [{"text": "?"}]}], "generationConfig": config}, "/v1beta/models/m:generateContent"
    )
    assert (rig.records[0].sampling.temperature, rig.records[0].sampling.top_k) == (0.5, 40)


async def test_values_that_only_a_route_says_are_in_the_request_and_the_record() -> None:
    route = Route(defaults={"temperature": 1.0, "top_p": 0.9})
    rig = Rig(lambda _: plays("vllm_chat_nonstream_token_ids.json"), CaptureSettings(default_route=route))
    await rig.call()
    assert (rig.served["temperature"], rig.served["top_p"]) == (1.0, 0.9)
    assert (rig.records[0].sampling.temperature, rig.records[0].sampling.top_p) == (1.0, 0.9)


async def test_of_alternatives_nothing_is_kept_and_the_chosen_ones_stay() -> None:
    top = [{"token": " is", "logprob": -0.02}]
    content = [
        {"token": text, "logprob": value, "top_logprobs": top} for text, value in ((" is", -0.02), (" 4", -0.35))
    ]
    rig = Rig(always(reply({"content": " is 4"}, [22, 23], logprobs={"content": content})))
    await rig.call()
    (choice,) = rig.records[0].choices
    assert choice.logprobs is not None
    assert choice.logprobs.tolist() == pytest.approx([-0.02, -0.35])
    assert b"top_logprobs" not in (rig.records[0].response or b"")


MARKUP = '<tool_call>{"name": "A", "arguments": {</tool_call>'
EMPTY = {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": ""}}]}


@pytest.mark.parametrize(
    ("message", "sign"),
    [({"content": None, **EMPTY}, "tool_args_empty"), ({"content": MARKUP}, "tool_parse_error")],
)
async def test_a_call_that_a_parser_lost_is_trained_and_told(message: dict[str, Any], sign: str) -> None:
    rig = Rig(always(reply({"role": "assistant", **message}, [912, 31, 913])))
    await rig.call({**ASK, "tools": TOOLS})
    (record,) = rig.records
    assert (record.metadata[sign], record.choices[0].trainable) == (True, True)
    assert f'parser_failures_total{{component="capture",prefix="",sign="{sign}"}} 1.0'.encode() in (
        rig.metrics.exposition()
    )


def test_a_call_inside_a_thought_is_none() -> None:
    call = '<tool_call>{"name":"A","arguments":{}}</tool_call>'
    said = read_text(f"<think>maybe {call}</think>{call}", thinks=False, tools=True, final=True)
    assert said.calls == (("A", "{}"),)


async def test_arguments_that_a_server_gives_as_an_object_are_not_lost_on_the_way_to_another_api() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    rig = Rig(always(reply({"content": None, "tool_calls": [call]}, [7], finish_reason="tool_calls")))
    asked = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
    _, text, _ = await rig.call(asked, "/v1/messages")
    assert [(block["name"], block["input"]) for block in orjson.loads(text)["content"]] == [
        ("get_weather", {"city": "Oslo"})
    ]


@pytest.mark.parametrize(
    ("served", "usage", "why"),
    [
        ([15, 16, 17], 3, None),
        ([15, 40], 2, "prompt_mismatch:sent(3),served(2)"),
        ([15, 16, 18], 3, "prompt_mismatch:sent(3),served(3)"),
        (None, 2, "prompt_ids(3)!=usage.prompt_tokens(2)"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_prompt_of_ids_that_was_tokenised_again_is_not_trained(
    path: str, served: list[int] | None, usage: int, why: str | None
) -> None:
    body = {**reply({"content": "x"}, [9]), "prompt_token_ids": served}
    body["choices"][0]["text"] = "x"
    body["usage"]["prompt_tokens"] = usage
    rig = Rig(always(body), CaptureSettings(default_route=Route(engine=EngineKind.SGLANG)))
    sent = {"prompt": [15, 16, 17]} if path == "/v1/completions" else {**ASK, "input_ids": [15, 16, 17]}
    await rig.call(sent, path)
    assert rig.records[0].choices[0].untrainable_reason == why


async def test_logprobs_without_a_single_id_are_recorded_and_say_nothing() -> None:
    rig = Rig(always(reply({"content": "x"}, [], logprobs={"content": [{"token": "x", "logprob": -0.5}]})))
    status, _, _ = await rig.call()
    (choice,) = rig.records[0].choices
    assert (status, choice.logprobs, choice.untrainable_reason) == (200, None, "empty")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/messages", {"max_tokens": 1, "stop_sequences": 5}, "stop_sequences"),
        ("/v1/messages", {"max_tokens": 1, "tools": [{"name": "f"}], "tool_choice": {"type": []}}, "tool_choice"),
        ("/v1/responses", {"input": [{"type": "reasoning", "content": 5}]}, "content"),
        ("/v1/responses", {"input": [{"role": "assistant", "content": 5}]}, "content"),
        (
            "/v1beta/models/m:generateContent",
            {
                "contents": "?",
                "tools": [{"functionDeclarations": [{"name": "f"}]}],
                "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": 5}},
            },
            "allowedFunctionNames",
        ),
    ],
)
async def test_fields_of_another_kind_are_refused_with_their_name(path: str, body: dict[str, Any], words: str) -> None:
    rig = Rig(lambda _: plays("vllm_chat_nonstream_token_ids.json"))
    status, text, _ = await rig.call({"model": "m", "messages": [{"role": "user", "content": "?"}], **body}, path)
    assert (status, rig.asked) == (400, [])
    assert words in text.decode()
