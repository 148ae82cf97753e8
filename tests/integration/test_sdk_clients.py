"""The stock clients of OpenAI, Anthropic and Google lead the same dialogue with tools against capture, unchanged but
for the base URL: the records of all have the same token truth.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anthropic
import httpx
import pytest
from google import genai
from google.genai import types as gemini
from openai import AsyncOpenAI, BadRequestError

from rollmill.codec import decode as decode_record
from rollmill.errors import EXIT_DRAINED
from rollmill.models import CallStatus, CompletionRecord, SessionEntry, SessionSpec, SessionState
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import free_port
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.canned_server import CannedServer, canned_server
from rollmill.testing.http.scripted_engine import ScriptedEngine, decode
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.processes import service_process
from rollmill.testing.tables import CaughtUp
from rollmill.testing.topic_log import read, read_all, running
from rollmill.topics import BUILT, COMPLETIONS
from rollmill_builder.app import build as build_builder
from rollmill_builder.settings import BuilderSettings
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.http.server import serve
from rollmill_capture.model_config import EngineKind, Route
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream, make_client

# Google's client takes aiohttp where that is installed, in a way that aiohttp warns of.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

WAIT = 30.0
SYSTEM = "You know the weather."
QUESTION = "Is it warmer in Oslo or in Rome? 🌡"
THANKS = "Thanks."
# The spacing of the arguments is what a model samples, and not what any library writes.
CALLS = (
    '<tool_call>{"name": "get_weather", "arguments": {"city":  "Oslo","unit" : "°C"}}</tool_call>'
    '<tool_call>{"name": "get_weather", "arguments": {"unit": "\\u00b0C", "city": "Rome"}}</tool_call>'
)
REPLIES = (f"<think>ask both</think>Let me see.{CALLS}", "<think>21 > 4</think>In Rome: 21 °C 🌞.", "You are welcome.")
RESULTS = {"Oslo": "4 °C", "Rome": "21 °C"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"type": "string"}},
    "required": ["city"],
}
TOOL = ("get_weather", "The temperature now.", SCHEMA)


@dataclass(frozen=True)
class Capture:
    url: str
    event_writer: MemoryEventWriter
    engine: CannedServer

    @property
    def records(self) -> list[CompletionRecord]:
        return self.event_writer.of(COMPLETIONS)


@asynccontextmanager
async def running_capture(engine: ScriptedEngine, route: Route | None = None) -> AsyncIterator[Capture]:
    """Capture's application on a socket, between the clients and an engine on another."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asyncio.timeout(WAIT), canned_server(engine.answer) as upstream:
            settings = CaptureSettings(upstream=upstream.url, default_route=route or Route())
            async with make_client(settings) as http:
                event_writer, stop, sessions = MemoryEventWriter(), asyncio.Event(), SessionTable()
                opened = SessionEntry(session_id="s", state=SessionState.OPEN, spec=SessionSpec(), opened_at=0.0)
                sessions.apply(opened)
                parts = CaptureParts(
                    settings=settings,
                    sessions=sessions,
                    position=CaughtUp(),
                    announced=AnnouncedVersions(),
                    event_writer=event_writer,
                    upstream=Upstream(http),
                    clock=ManualClock(),
                    metrics=Metrics("capture"),
                )
                serving = asyncio.create_task(serve(assemble(parts), listener, settings, stop))
                yield Capture(f"http://127.0.0.1:{listener.getsockname()[1]}", event_writer, upstream)
                stop.set()
                await serving


Dialogue = Callable[[str], Awaitable[list[str]]]
"""Leads the dialogue against a session's address (without ``/v1``); gives the texts that the agent saw."""


def weather(arguments: Any) -> str:
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert found["unit"] == "°C"
    return RESULTS[found["city"]]


async def chat(address: str, *, stream: bool) -> list[str]:
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        name, description, schema = TOOL
        tool: Any = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": schema},
        }
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        seen: list[str] = []
        while len(seen) < 3:
            if stream:
                async with client.chat.completions.stream(model="toy", messages=messages, tools=[tool]) as events:
                    message: Any = (await events.get_final_completion()).choices[0].message
                history = message.model_dump(exclude_none=True, exclude={"parsed"})
                for call in history.get("tool_calls", ()):
                    call["function"].pop("parsed_arguments", None)
                    call.pop("index", None)
            else:
                answer = await client.chat.completions.create(model="toy", messages=messages, tools=[tool])
                message = answer.choices[0].message
                history = message.model_dump(exclude_none=True)
            messages.append(history)
            seen.append(message.content or "")
            for call in message.tool_calls or ():
                result = weather(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                messages.append({"role": "user", "content": THANKS})
        return seen


async def responses(address: str, *, stream: bool, remembered: bool = False) -> list[str]:
    """``remembered``: by the id of the response before, in place of the history."""
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        name, description, schema = TOOL
        tool: Any = {"type": "function", "name": name, "description": description, "parameters": schema, "strict": None}
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        seen: list[str] = []
        before: str | None = None
        while len(seen) < 3:
            asked: dict[str, Any] = {"model": "toy", "instructions": SYSTEM, "input": items, "tools": [tool]}
            if remembered and before is not None:
                asked["previous_response_id"] = before
            if stream:
                async with client.responses.stream(**asked) as events:
                    numbers = [event.sequence_number async for event in events]
                    response: Any = await events.get_final_response()
                assert numbers == list(range(len(numbers)))
            else:
                response = await client.responses.create(**asked)
            assert response.status == "completed"
            seen.append(response.output_text)
            items, before = ([] if remembered else [*items, *map(_item, response.output)]), response.id
            calls = [item for item in response.output if item.type == "function_call"]
            for call in calls:
                result = weather(call.arguments)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
            if not calls:
                items.append({"role": "user", "content": THANKS})
        return seen


def _item(item: Any) -> dict[str, Any]:
    found: dict[str, Any] = item.model_dump(exclude_none=True)
    found.pop("parsed_arguments", None)
    for part in found.get("content", ()):
        part.pop("parsed", None)
    return found


async def messages(address: str, *, stream: bool) -> list[str]:
    async with anthropic.AsyncAnthropic(base_url=address, api_key="none", max_retries=0) as client:
        name, description, schema = TOOL
        tool: Any = {"name": name, "description": description, "input_schema": schema}
        turns: list[Any] = [{"role": "user", "content": QUESTION}]
        seen: list[str] = []
        while len(seen) < 3:
            asked: dict[str, Any] = {
                "model": "toy",
                "max_tokens": 500,
                "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
                "messages": turns,
                "tools": [tool],
            }
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            turns.append({"role": "assistant", "content": answer.content})
            seen.append("".join(block.text for block in answer.content if block.type == "text"))
            calls = [block for block in answer.content if block.type == "tool_use"]
            assert answer.stop_reason == ("tool_use" if calls else "end_turn")
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": weather(block.input)} for block in calls
            ]
            turns.append({"role": "user", "content": results or THANKS})
        return seen


async def google(address: str, *, stream: bool) -> list[str]:
    options = gemini.HttpOptions(base_url=address)
    async with genai.Client(api_key="none", http_options=options).aio as client:
        name, description, schema = TOOL
        function = gemini.FunctionDeclaration(name=name, description=description, parameters_json_schema=schema)
        config = gemini.GenerateContentConfig(
            system_instruction=SYSTEM,
            tools=[gemini.Tool(function_declarations=[function])],
            automatic_function_calling=gemini.AutomaticFunctionCallingConfig(disable=True),
        )
        contents: list[Any] = [gemini.Content(role="user", parts=[gemini.Part(text=QUESTION)])]
        seen: list[str] = []
        while len(seen) < 3:
            if stream:
                pieces = await client.models.generate_content_stream(model="toy", contents=contents, config=config)
                parts: Any = [part async for piece in pieces for part in parts_of(piece)]
            else:
                answer = await client.models.generate_content(model="toy", contents=contents, config=config)
                parts = parts_of(answer)
            contents.append(gemini.Content(role="model", parts=parts))
            seen.append("".join(part.text or "" for part in parts if not part.thought))
            calls = [part.function_call for part in parts if part.function_call]
            results = [_response(call) for call in calls] or [gemini.Part(text=THANKS)]
            contents.append(gemini.Content(role="user", parts=results))
        return seen


def parts_of(answer: Any) -> list[gemini.Part]:
    return list(answer.candidates[0].content.parts or ())


def _response(call: Any) -> gemini.Part:
    response = gemini.FunctionResponse(id=call.id, name=call.name, response={"output": weather(call.args)})
    return gemini.Part(function_response=response)


DIALOGUES: dict[str, Dialogue] = {
    "chat": partial(chat, stream=False),
    "chat-stream": partial(chat, stream=True),
    "responses": partial(responses, stream=False),
    "responses-stream": partial(responses, stream=True),
    "responses-remembered": partial(responses, stream=False, remembered=True),
    "responses-remembered-stream": partial(responses, stream=True, remembered=True),
    "messages": partial(messages, stream=False),
    "messages-stream": partial(messages, stream=True),
    "gemini": partial(google, stream=False),
    "gemini-stream": partial(google, stream=True),
}
SEEN = ["Let me see.", "In Rome: 21 °C 🌞.", "You are welcome."]
Truth = list[tuple[list[int], list[int], list[float]]]


def truth(records: list[CompletionRecord]) -> Truth:
    """Prompt, sampled ids and log-probs of each call; all of them trainable."""
    found = []
    for record in records:
        (choice,) = record.choices
        assert (record.status, choice.trainable, choice.untrainable_reason) == (CallStatus.OK, True, None)
        assert record.prompt_ids is not None
        assert choice.token_ids is not None
        assert choice.logprobs is not None
        found.append((record.prompt_ids.tolist(), choice.token_ids.tolist(), choice.logprobs.tolist()))
    return found


async def led(dialogue: Dialogue, engine: ScriptedEngine, route: Route | None = None) -> Capture:
    async with running_capture(engine, route) as capture:
        assert await dialogue(f"{capture.url}/sessions/s") == SEEN
    return capture


@pytest.fixture(scope="module")
def expected() -> Truth:
    return truth(asyncio.run(led(DIALOGUES["chat"], ScriptedEngine(REPLIES))).records)


def test_every_prompt_goes_on_from_the_reply_before(expected: Truth) -> None:
    (first, said, _), (second, more, _), (third, _, _) = expected
    assert decode(first).startswith("<|im_start|>tools\n")
    assert decode(said) == REPLIES[0] + "<|im_end|>"
    assert second[: len(first) + len(said)] == first + said
    assert third[: len(second) + len(more)] == second + more


@pytest.mark.parametrize("dialogue", DIALOGUES)
async def test_all_clients_have_the_same_token_truth(dialogue: str, expected: Truth) -> None:
    capture = await led(DIALOGUES[dialogue], ScriptedEngine(REPLIES))
    assert truth(capture.records) == expected


@pytest.mark.parametrize("dialogue", DIALOGUES)
async def test_so_have_they_where_the_engine_streams_no_ids(dialogue: str, expected: Truth) -> None:
    engine = ScriptedEngine(REPLIES, owner="sglang", stream_ids=False)
    capture = await led(DIALOGUES[dialogue], engine, Route(engine=EngineKind.SGLANG))
    assert truth(capture.records) == expected
    assert not any(asked.body.get("stream") for asked in capture.engine.requests)


@pytest.mark.parametrize("dialogue", ["responses", "messages-stream", "gemini-stream"])
async def test_the_record_keeps_what_was_asked_and_what_was_served(dialogue: str) -> None:
    capture = await led(DIALOGUES[dialogue], ScriptedEngine(REPLIES))
    for record, asked in zip(capture.records, capture.engine.requests, strict=True):
        assert json.loads(record.request or b"") == asked.body
        original = json.loads(record.original_request or b"")
        assert {"input", "system", "systemInstruction"} & set(original)
        assert record.metadata["api"] in {"responses", "messages", "gemini"}


@pytest.mark.kafka
async def test_all_clients_have_the_same_traces_through_the_process_kafka_and_the_builder(
    kafka_broker: EmbeddedKafka, topic_prefix: str, expected: Truth
) -> None:
    settings = BuilderSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=4)
    await apply_topics(settings)
    port = free_port()
    environment = {
        "ROLLMILL_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ROLLMILL_PREFIX": settings.prefix,
        "ROLLMILL_PARTITIONS": str(settings.partitions),
        "ROLLMILL_PORT": str(port),
    }
    async with (
        asyncio.timeout(4 * WAIT),
        canned_server(ScriptedEngine(REPLIES).answer) as engine,
        service_process("rollmill_capture", {**environment, "ROLLMILL_UPSTREAM": engine.url}) as process,
        running(settings, build_builder(settings).stages),
    ):
        await process.wait_for_log(b"capture listens")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT) as http:
            await asyncio.gather(*(_led_in_a_session(http, name) for name in DIALOGUES))
        built = await read(settings, BUILT, len(DIALOGUES))
        assert await process.stop() == EXIT_DRAINED
    events = await read_all(settings, COMPLETIONS)
    for name in DIALOGUES:
        calls = [event for event in events if isinstance(event, CompletionRecord) and event.session_id == name]
        assert truth(sorted(calls, key=lambda call: call.started_at)) == expected, name
    # The whole dialogue is one trace, the same for all: prompts as context, what was sampled with its log-probs.
    first, sampled = expected[0][0], [token for _, said, _ in expected for token in said]
    whole = [*expected[-1][0], *expected[-1][1]]
    for item in built:
        (trace,) = decode_record(BUILT.model, item.value, tuple(item.headers)).traces
        assert [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()] == whole, item.key
        assert trace.prompt_ids.tolist() == first
        trained = trace.loss_mask.astype(bool)
        assert trace.response_ids[trained].tolist() == sampled
        assert trace.response_logprobs is not None
        assert trace.response_logprobs[trained].tolist() == [value for *_, values in expected for value in values]


async def _led_in_a_session(http: httpx.AsyncClient, name: str) -> None:
    (await http.post("/v1/sessions", json={"session_id": name})).raise_for_status()
    assert await DIALOGUES[name](f"{str(http.base_url).rstrip('/')}/sessions/{name}") == SEEN
    (await http.post(f"/v1/sessions/{name}/close", json={})).raise_for_status()


async def test_errors_have_the_shape_that_each_client_raises_on() -> None:
    async with running_capture(ScriptedEngine(())) as capture:
        async with AsyncOpenAI(base_url=f"{capture.url}/sessions/s/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(BadRequestError, match="the script is over"):
                await client.responses.create(model="toy", input="hi")
            with pytest.raises(BadRequestError, match="not found"):
                await client.responses.create(model="toy", input="hi", previous_response_id="resp_none")
        async with anthropic.AsyncAnthropic(base_url=f"{capture.url}/sessions/s/v1", api_key="x", max_retries=0) as two:
            with pytest.raises(anthropic.BadRequestError, match="the script is over"):
                await two.messages.create(model="toy", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
        options = gemini.HttpOptions(base_url=f"{capture.url}/sessions/s/v1")
        async with genai.Client(api_key="x", http_options=options).aio as third:
            with pytest.raises(genai.errors.ClientError, match="the script is over"):
                await third.models.generate_content(model="toy", contents="hi")
