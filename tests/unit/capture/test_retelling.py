"""A reply with thoughts and tool calls that the engine breaks off: its rest comes as text and is told on as chat."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from rollmill.models import CompletionRecord, PauseMode, SessionEntry, SessionSpec, SessionState
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.http.scripted_engine import decode, encode
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policies import AnnouncedVersions, PausedPolicies
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.proxy.reasoning_parser import CannotContinueError, ParsedText, ReasoningAndToolParser, read_text
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream

WAIT = 5.0
ONE = '<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>'
TWO = '<tool_call>{"arguments": {"b": "}"}, "name": "g"}</tool_call>'
TEXT = f"<think>hm, let me</think>\n\nI look.{ONE}\n{TWO}"
CALLS = (("f", '{"a":  1}'), ("g", '{"b":"}"}'))
WHOLE = ParsedText("hm, let me", "\n\nI look.", CALLS)
PROMPT = [1, 2, 3]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_a_text_says_thoughts_content_and_calls_as_they_were_sampled() -> None:
    assert read_text(TEXT, thinks=False, tools=True, final=True) == WHOLE
    assert read_text(TEXT.removeprefix("<think>"), thinks=True, tools=True, final=True) == WHOLE
    assert read_text("no tools <tool_call>", thinks=False, tools=False, final=False) == ParsedText(
        "", "no tools <tool_call>"
    )


def test_an_end_that_may_become_a_marker_waits() -> None:
    assert read_text("<think>so</thi", thinks=False, tools=True, final=False) == ParsedText("so")
    assert read_text("well<tool_", thinks=False, tools=True, final=False) == ParsedText("", "well")
    assert read_text("well<tool_", thinks=False, tools=True, final=True) == ParsedText("", "well<tool_")
    assert read_text(f"x{ONE[:-3]}", thinks=False, tools=True, final=False) == ParsedText("", "x")


def test_a_call_in_another_form_cannot_be_continued() -> None:
    with pytest.raises(CannotContinueError, match="form"):
        read_text("<tool_call>f(1)</tool_call>", thinks=False, tools=True, final=True)


def test_what_was_told_is_never_taken_back() -> None:
    for message in ({"content": "Other."}, {"tool_calls": [{"function": {"name": "h", "arguments": ""}}]}):
        with pytest.raises(CannotContinueError, match="differs"):
            ReasoningAndToolParser(TEXT, message, tools=True, name="c").feed("", final=True)


def added(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("reasoning_content", "content"):
        whole[name] = whole.get(name, "") + delta.get(name, "")
    for piece in delta.get("tool_calls", ()):
        calls = whole.setdefault("tool_calls", [])
        if piece["index"] == len(calls):
            calls.append({"name": "", "arguments": ""})
        for name in ("name", "arguments"):
            calls[piece["index"]][name] += piece["function"].get(name, "")


def test_wherever_a_reply_is_broken_off_its_parts_make_the_whole() -> None:
    for cut in range(len(TEXT)):
        before = read_text(TEXT[:cut], thinks=False, tools=True, final=False)
        calls = [{"id": "c", "function": {"name": name, "arguments": arguments}} for name, arguments in before.calls]
        message = {"reasoning_content": before.reasoning, "content": before.content.lstrip(), "tool_calls": calls}
        told = ReasoningAndToolParser(TEXT[:cut], message, tools=True, name="c")
        whole: dict[str, Any] = {}
        added(whole, {**message, "tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]})
        for place in range(cut, len(TEXT), 3):
            added(whole, told.feed(TEXT[place : place + 3], final=place + 3 >= len(TEXT)))
        assert whole["reasoning_content"] == "hm, let me"
        assert whole["content"].lstrip() == "I look."
        assert [tuple(call.values()) for call in whole["tool_calls"]] == list(CALLS)


def test_a_call_that_was_told_in_part_goes_on_where_it_stopped() -> None:
    cut = TEXT.index("1}")
    message = {
        "reasoning_content": "hm, let me",
        "content": "I look.",
        "tool_calls": [{"id": "c9", "type": "function", "function": {"name": "f", "arguments": '{"a":  '}}],
    }
    told = ReasoningAndToolParser(TEXT[:cut], message, tools=True, name="c")
    delta = told.feed(TEXT[cut:], final=True)
    assert delta["tool_calls"][0] == {"index": 0, "function": {"arguments": "1}"}}
    assert delta["tool_calls"][1]["function"]["name"] == "g"
    assert [call["id"] for call in told.message()["tool_calls"]] == ["c9", "call_c_1"]


def logprobs(ids: list[int]) -> list[float]:
    return [-number / 512 for number in ids]


class Engine:
    """Breaks the chat off after ``cut`` tokens, tells texts of ids, and completes."""

    def __init__(self, cut: int, *, detokenizes: bool = True) -> None:
        self.begun, self.rest = encode(TEXT)[:cut], encode(TEXT)[cut:]
        self.detokenizes = detokenizes
        self.completed: dict[str, Any] = {}

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = orjson.loads(request.content)
        if request.url.path == "/detokenize":
            known = {"prompt": decode(body["tokens"])} if self.detokenizes else {"error": "no route"}
            return httpx.Response(200 if self.detokenizes else 404, json=known)
        if request.url.path == "/v1/completions":
            self.completed = body
            return self._said(body, self._text())
        return self._said(body, self._chat())

    def _chat(self) -> list[dict[str, Any]]:
        said = read_text(decode(self.begun), thinks=False, tools=True, final=False)
        calls = [
            {"index": place, "id": f"e{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for place, (name, arguments) in enumerate(said.calls)
        ]
        told = {"role": "assistant", "content": said.content, "reasoning_content": said.reasoning, "tool_calls": calls}
        entries = [{"token": decode([t]), "logprob": p} for t, p in zip(self.begun, logprobs(self.begun), strict=True)]
        choice = {"index": 0, "finish_reason": "abort", "token_ids": self.begun, "logprobs": {"content": entries}}
        shown = {name: part for name, part in told.items() if part}
        return [{"id": "chat-1", "model": "m", "prompt_token_ids": PROMPT, "choices": [{**choice, "message": shown}]}]

    def _text(self) -> list[dict[str, Any]]:
        found = []
        for start in range(0, len(self.rest), 3):
            ids = self.rest[start : start + 3]
            last = start + 3 >= len(self.rest)
            known = {"tokens": [decode([token]) for token in ids], "token_logprobs": logprobs(ids)}
            choice = {"index": 0, "text": decode(ids), "token_ids": ids, "logprobs": known}
            found.append({"choices": [{**choice, "finish_reason": "stop" if last else None}]})
        return found

    def _said(self, body: dict[str, Any], chunks: list[dict[str, Any]]) -> httpx.Response:
        if not body.get("stream"):
            return httpx.Response(200, json=_joined(chunks))
        for chunk in chunks:
            for choice in chunk["choices"]:
                if "message" in choice:
                    choice["delta"] = choice.pop("message")
        frames = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
        return httpx.Response(200, content=frames + b"data: [DONE]\n\n")


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    first = chunks[0]
    for chunk in chunks[1:]:
        (mine,), (more,) = first["choices"], chunk["choices"]
        mine["text"] += more["text"]
        mine["token_ids"] = mine["token_ids"] + more["token_ids"]
        mine["finish_reason"] = more["finish_reason"]
        for name in ("tokens", "token_logprobs"):
            mine["logprobs"][name] = mine["logprobs"][name] + more["logprobs"][name]
    return first


async def called(engine: Engine, *, stream: bool) -> tuple[bytes, CompletionRecord]:
    pauses, event_writer, table = PausedPolicies(WAIT), MemoryEventWriter(), SessionTable()
    pauses.pause("policy", PauseMode.ABORT_RESUME)
    pauses.resume("policy")
    table.apply(SessionEntry(session_id="s1", state=SessionState.OPEN, spec=SessionSpec(), opened_at=1.0))
    parts = CaptureParts(
        settings=CaptureSettings(),
        sessions=table,
        position=CaughtUp(),
        announced=AnnouncedVersions(),
        event_writer=event_writer,
        upstream=Upstream(httpx.AsyncClient(transport=httpx.MockTransport(engine.answer)), pauses),
        clock=ManualClock(),
        metrics=Metrics("capture"),
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "stream": stream}
    path = "/sessions/s1/v1/chat/completions"
    async with AsgiCall(assemble(parts), "POST", path, body) as call, asyncio.timeout(WAIT):
        raw = await call.rest()
    (record,) = event_writer.of(COMPLETIONS)
    return raw, record


CUTS = [
    1,
    5,
    len(encode(TEXT.partition("look")[0])),
    *(len(encode(TEXT[: TEXT.index(TWO)])) + more for more in (-9, 0, 5)),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cut", CUTS)
async def test_a_broken_reply_goes_on_as_one_with_all_its_ids(cut: int, *, stream: bool) -> None:
    engine = Engine(cut)
    _, record = await called(engine, stream=stream)
    (choice,) = record.choices
    assert (record.status.value, choice.finish_reason, choice.trainable) == ("ok", "tool_calls", True)
    assert choice.token_ids is not None
    assert choice.token_ids.tolist() == encode(TEXT)
    assert choice.logprobs is not None
    assert choice.logprobs.tolist() == logprobs(encode(TEXT))
    message = orjson.loads(choice.message or b"")
    assert message["content"].strip() == "I look."
    assert message["reasoning_content"] == "hm, let me"
    assert [tuple(call["function"].values()) for call in message["tool_calls"]] == list(CALLS)
    assert engine.completed["prompt"] == [*PROMPT, *encode(TEXT)[:cut]]
    assert engine.completed["skip_special_tokens"] is False


@pytest.mark.parametrize("stream", [True, False])
async def test_without_the_text_of_what_was_sampled_the_client_gets_an_error_and_the_record_says_why(
    *, stream: bool
) -> None:
    raw, record = await called(Engine(20, detokenizes=False), stream=stream)
    assert b"error" in raw
    assert record.status.value == "incomplete"
    assert "/detokenize" in record.metadata["not_continued"]
    assert not record.choices[0].trainable
