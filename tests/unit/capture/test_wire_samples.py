"""Each sample of an engine's or gateway's answer is read as the table beside it says, whole or in any pieces; and so is
its record, when a server plays the file behind capture.

Rows of the field's bug log, by their samples: B001 (tokens_swallowed), B002 (ids_null), B003 without its fallback
(sglang_chat_stream), B006 (moved_ids), B015 (keepalive_and_meta), B016 (choices_null), B019 (stream_cumulative,
stream_incremental), B048 (logprob_sentinel).
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rollmill import topics
from rollmill.models import (
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
from rollmill.testing.http.canned_server import CannedRequest, CannedResponse, canned_server
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill_capture.apis.openai import PassthroughFormatter
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.model_config import Route
from rollmill_capture.proxy.response_stream import StreamRelay
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream, make_client
from rollmill_capture.upstream.formats.parsed_reply import ParsedChoice, ParsedReply, as_ids, error_of
from rollmill_capture.upstream.formats.upstream_format import (
    ANTHROPIC_MESSAGES,
    CHAT,
    COMPLETIONS,
    OPENAI_RESPONSES,
    SGLANG_GENERATE,
    VLLM_GENERATE,
    UpstreamFormat,
)

WIRE = Path(__file__).parents[2] / "fixtures" / "wire"
TABLE: dict[str, dict[str, Any]] = json.loads((WIRE / "expected.json").read_text())
EXPECTED = {name: {key: row[key] for key in row if key != "meaning"} for name, row in TABLE.items()}
ANSWERS = [name for name in EXPECTED if "http_status" not in EXPECTED[name]]
STREAMS = [name for name in ANSWERS if name.endswith(".sse")]
PROMPT = [1, 2, 3]
"""What requests with ids send."""
WAIT = 5.0
ANNOUNCED = PolicyVersion(0, 3)


def format_of(name: str) -> UpstreamFormat:
    starts = {
        "vllm_completions": COMPLETIONS,
        "vllm_inference": VLLM_GENERATE,
        "sglang_generate": SGLANG_GENERATE,
        "openai_responses": OPENAI_RESPONSES,
        "anthropic": ANTHROPIC_MESSAGES,
        "vllm_anthropic": ANTHROPIC_MESSAGES,
    }
    return next((upstream_format for start, upstream_format in starts.items() if name.startswith(start)), CHAT)


def sent_ids(upstream_format: UpstreamFormat) -> list[int] | None:
    return PROMPT if upstream_format in (VLLM_GENERATE, SGLANG_GENERATE, COMPLETIONS) else None


def read(name: str, piece: int = 1 << 20) -> ParsedReply:
    raw, upstream_format = (WIRE / name).read_bytes(), format_of(name)
    prompt = as_ids(sent_ids(upstream_format))
    if name.endswith(".json"):
        return upstream_format.parse_body(orjson.loads(raw), prompt)
    assembler = upstream_format.assembler(len(EXPECTED[name].get("choices", "1")), prompt)
    relay = StreamRelay(assembler, PassthroughFormatter(upstream_format).stream_formatter(), b"")
    for start in range(0, len(raw), piece):
        relay.feed(raw[start : start + piece])
    return relay.reading()


def numbers(values: Any) -> list[float | None] | None:
    return None if values is None else [None if np.isnan(value) else round(float(value), 5) for value in values]


def ids(values: Any) -> list[int] | None:
    return None if values is None else values.tolist()


def message(raw: bytes | None) -> dict[str, Any]:
    whole: dict[str, Any] = orjson.loads(raw or b"{}")
    return whole


def message_fields(whole: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Text, thoughts and calls of a message, with arguments as an object where the table has one."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in whole.get("tool_calls") or []]
    for call, wanted in zip(calls, expected.get("tool_calls", []), strict=False):
        call[1] = json.loads(call[1]) if isinstance(wanted[1], dict) else call[1]
    return {
        "text": whole.get("content") or "",
        "reasoning": whole.get("reasoning") or whole.get("reasoning_content"),
        "tool_calls": calls,
    }


def wanted(name: str) -> dict[str, Any]:
    expected = EXPECTED[name]
    from_request = {"prompt_ids": PROMPT} if isinstance(expected.get("prompt_ids"), str) else {}
    return {**expected, **from_request}


def as_expected(reply: ParsedReply, expected: dict[str, Any]) -> dict[str, Any]:
    """The reply, in the keys of the table and no more of them than it uses."""
    first = reply.choices[0] if reply.choices else ParsedChoice(0)
    why = reply.untrainable_reason(first)
    found = {
        "prompt_ids": ids(reply.prompt_ids),
        "completion_ids": ids(first.token_ids),
        "logprobs": numbers(first.logprobs),
        "choices": {
            str(choice.index): {"completion_ids": ids(choice.token_ids), "logprobs": numbers(choice.logprobs)}
            for choice in reply.choices
        },
        **message_fields(message(first.message), expected),
        "finish_reason": first.finish_reason,
        "usage": list(reply.usage or ()),
        "complete": reply.complete,
        "is_error": reply.incomplete in {"error_frame", "not_sse"},
        "weight_version": reply.weight_versions[0] if reply.weight_versions else None,
        "trainable": "partial" if why == "partial:abort" else why is None,
        "why": why,
    }
    return {key: found[key] for key in expected}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_sample_is_read_as_expected(name: str) -> None:
    assert as_expected(read(name), wanted(name)) == wanted(name)


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("name", STREAMS)
def test_the_cuts_between_chunks_do_not_matter(name: str, piece: int) -> None:
    assert as_expected(read(name, piece), wanted(name)) == wanted(name)


def test_every_sample_has_its_line_in_the_table() -> None:
    requests = {"sglang_chat_request_input_ids.json", "sglang_generate_request.json"}
    assert {path.name for path in WIRE.iterdir()} - {"expected.json"} == set(EXPECTED) | requests


@pytest.mark.parametrize(
    ("name", "message_text"),
    [
        ("vllm_error_400_context.json", "maximum context length"),
        ("vllm_error_400_legacy_flat.json", "already running"),
        ("sglang_error_400_flat.json", ""),
        ("sglang_generate_error_400.json", "longer than the context length"),
        ("anthropic_error_529.json", "Overloaded"),
    ],
)
def test_wrapped_and_flat_errors_tell_their_message(name: str, message_text: str) -> None:
    found = error_of(orjson.loads((WIRE / name).read_bytes()))
    assert found is not None
    assert message_text in found


def test_a_stream_reads_like_the_whole_answer() -> None:
    stream, whole = read("vllm_chat_stream_tool_reasoning.sse"), read("vllm_chat_nonstream_tool_reasoning.json")
    assert ids(stream.prompt_ids) == ids(whole.prompt_ids)
    assert numbers(stream.choices[0].logprobs) == numbers(whole.choices[0].logprobs)
    assert message(stream.choices[0].message)["tool_calls"] == message(whole.choices[0].message)["tool_calls"]
    assert (stream.usage, stream.model) == (whole.usage, whole.model)


def request_body(name: str) -> dict[str, Any]:
    """A request to which the file may be the answer."""
    upstream_format, stream = format_of(name), name.endswith(".sse")
    bodies: dict[str, dict[str, Any]] = {
        CHAT.name: {"messages": [{"role": "user", "content": "2+2?"}], "n": len(EXPECTED[name].get("choices", "1"))},
        COMPLETIONS.name: {"prompt": PROMPT},
        VLLM_GENERATE.name: {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
        SGLANG_GENERATE.name: orjson.loads((WIRE / "sglang_generate_request.json").read_bytes()),
        OPENAI_RESPONSES.name: {"input": "2+2?"},
        ANTHROPIC_MESSAGES.name: {"messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 8},
    }
    return {**bodies[upstream_format.name], "model": "m-test", "stream": stream}


def played(name: str, piece: int) -> CannedResponse:
    raw, status = (WIRE / name).read_bytes(), EXPECTED[name].get("http_status", 200)
    return CannedResponse.events(raw, piece) if name.endswith(".sse") else CannedResponse((raw,), status)


async def recorded(name: str, piece: int = 1 << 20) -> tuple[CompletionRecord, int, bytes, dict[str, str]]:
    """The record of one call that the file answers, and what the client got."""

    def answer(asked: CannedRequest) -> CannedResponse:
        assert asked.path == format_of(name).path
        return played(name, piece)

    async with asyncio.timeout(WAIT), canned_server(answer) as engine:
        settings = CaptureSettings(upstream=engine.url, default_route=Route(native=("responses", "messages")))
        async with make_client(settings) as http:
            event_writer, sessions, announced = MemoryEventWriter(), SessionTable(), AnnouncedVersions()
            announced.apply("policy", PolicyAnnouncement(version=ANNOUNCED, at=0.0))
            sessions.apply(SessionEntry(session_id="s", state=SessionState.OPEN, spec=SessionSpec(), opened_at=0.0))
            app = assemble(
                CaptureParts(
                    settings=settings,
                    sessions=sessions,
                    position=CaughtUp(),
                    announced=announced,
                    event_writer=event_writer,
                    upstream=Upstream(http),
                    clock=ManualClock(),
                    metrics=Metrics("capture"),
                )
            )
            async with AsgiCall(app, "POST", f"/sessions/s{format_of(name).path}", request_body(name)) as call:
                text = await call.rest()
        (record,) = event_writer.of(topics.COMPLETIONS)
        return record, call.status, text, call.headers


def recorded_as(record: CompletionRecord, status: int, text: bytes, expected: dict[str, Any]) -> dict[str, Any]:
    """The record, in the keys of the table and no more of them than it uses."""
    first = record.choices[0] if record.choices else None
    why = first.untrainable_reason if first is not None else (record.error or "").partition(":")[0]
    version = record.policy.before
    found = {
        "prompt_ids": ids(record.prompt_ids),
        "completion_ids": None if first is None else ids(first.token_ids),
        "logprobs": None if first is None else numbers(first.logprobs),
        "choices": {
            str(choice.index): {"completion_ids": ids(choice.token_ids), "logprobs": numbers(choice.logprobs)}
            for choice in record.choices
        },
        **message_fields(message(None if first is None else first.message), expected),
        "finish_reason": None if first is None else first.finish_reason,
        "usage": record.usage_completion_tokens,
        "complete": record.status is CallStatus.OK,
        "is_error": status >= 400 or b'"error"' in text,
        "weight_version": None if version == ANNOUNCED else str(version.version),
        "trainable": "partial" if why == "partial:abort" else why is None,
        "why": why,
        "http_status": record.http_status,
        "retryable": status in (429, 503, 529),
    }
    return {key: found[key] for key in expected}


def wanted_of_record(name: str) -> dict[str, Any]:
    """The log keeps no log-probs that are not all known, and of usage the number of sampled tokens."""
    expected = wanted(name)
    if None in (expected.get("logprobs") or []):
        expected["logprobs"] = None
    if "usage" in expected:
        expected["usage"] = expected["usage"][1]
    return expected


@pytest.mark.parametrize("name", EXPECTED)
async def test_its_record_is_as_expected_when_a_server_plays_it(name: str) -> None:
    record, status, text, _ = await recorded(name)
    expected = wanted_of_record(name)
    assert recorded_as(record, status, text, expected) == expected
    assert status == expected.get("http_status", 502 if expected.get("why") == "not_sse" else 200)


@pytest.mark.parametrize("name", STREAMS)
async def test_its_record_is_the_same_in_pieces(name: str) -> None:
    record, status, text, _ = await recorded(name, piece=11)
    expected = wanted_of_record(name)
    assert recorded_as(record, status, text, expected) == expected


async def test_refusals_pass_unchanged_and_are_not_called_final() -> None:
    for name in ("anthropic_error_529.json", "sglang_error_400_flat.json"):
        _, _, text, headers = await recorded(name)
        assert text == (WIRE / name).read_bytes()
        assert "x-should-retry" not in headers
