"""Weight updates: paused calls wait, calls get the version that sampled them, stale caches are told."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from rollmill.models import CompletionRecord, PauseMode, PolicyVersion, SessionEntry, SessionSpec, SessionState
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import COMPLETIONS
from rollmill_capture.coordination.policies import AnnouncedVersions, PausedPolicies, PausedTooLongError
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.http.keys import digest_of
from rollmill_capture.model_config import Route, VersionSource
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream

WIRE = Path(__file__).parents[2] / "fixtures" / "wire"
REPLY = orjson.loads((WIRE / "vllm_chat_nonstream_token_ids.json").read_bytes())
ASK = {"model": "m-test", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 16}
CALL = "/sessions/s1/v1/chat/completions"
ADMIN = "/admin/policies/policy"
WAIT = 5.0


@dataclass
class Rig:
    """Capture with one open session; the engine answers what ``replies`` says, once ``engine`` is set."""

    settings: CaptureSettings = field(default_factory=CaptureSettings)
    pauses: PausedPolicies = field(default_factory=lambda: PausedPolicies(WAIT))
    replies: list[httpx.Response] = field(default_factory=list)
    event_writer: MemoryEventWriter = field(default_factory=MemoryEventWriter)
    announced: AnnouncedVersions = field(default_factory=AnnouncedVersions)
    metrics: Metrics = field(default_factory=lambda: Metrics("capture"))
    engine: asyncio.Event = field(default_factory=asyncio.Event)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[httpx.Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine.set()
        table = SessionTable()
        table.apply(SessionEntry(session_id="s1", state=SessionState.OPEN, spec=SessionSpec(), opened_at=1.0))
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.app = assemble(
            CaptureParts(
                settings=self.settings,
                sessions=table,
                position=CaughtUp(),
                announced=self.announced,
                event_writer=self.event_writer,
                upstream=Upstream(client, self.pauses),
                clock=ManualClock(),
                metrics=self.metrics,
            )
        )

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        self.called.set()
        await self.engine.wait()
        return self.replies.pop(0) if self.replies else httpx.Response(200, json=REPLY)

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        async with AsgiCall(self.app, "POST", path, body, headers) as call, asyncio.timeout(WAIT):
            answer = await call.json()
        return call.status, answer

    async def call(self, body: object = ASK) -> int:
        return (await self.post(CALL, body))[0]

    @property
    def records(self) -> list[CompletionRecord]:
        return [item for item in self.event_writer.of(COMPLETIONS) if isinstance(item, CompletionRecord)]

    async def waiting(self, count: int) -> None:
        """Until so many calls stand in front of the gate."""
        async with asyncio.timeout(WAIT):
            while self.pauses.status("policy")["waiting"] < count:  # noqa: ASYNC110  # a turn of the loop is enough
                await asyncio.sleep(0)


async def test_paused_calls_wait_and_none_is_refused_or_sent_and_they_get_the_new_version() -> None:
    rig = Rig()
    status, answer = await rig.post(f"{ADMIN}/pause", {"mode": "keep"})
    assert (status, answer["paused"], answer["mode"]) == (200, True, "keep")
    calls = [asyncio.create_task(rig.call()) for _ in range(3)]
    await rig.waiting(3)
    assert rig.asked == []
    assert (await rig.post(f"{ADMIN}/resume", {"version": [0, 5]}))[1]["version"] == [0, 5]
    assert await asyncio.gather(*calls) == [200] * 3
    assert [(record.policy.before, record.policy.after) for record in rig.records] == [(PolicyVersion(0, 5),) * 2] * 3


async def test_a_pause_that_waits_is_complete_when_the_calls_in_flight_have_ended() -> None:
    rig = Rig()
    rig.engine.clear()
    call = asyncio.create_task(rig.call())
    await rig.called.wait()
    status, answer = await rig.post(f"{ADMIN}/pause", {"seconds": 0})
    assert (status, answer["in_flight"]) == (202, 1)
    pausing = asyncio.create_task(rig.post(f"{ADMIN}/pause", {}))
    rig.engine.set()
    status, answer = await pausing
    assert (status, answer["in_flight"], await call) == (200, 0, 200)


async def test_a_version_that_comes_during_a_call_does_not_label_its_tokens() -> None:
    rig = Rig(announced=AnnouncedVersions())
    rig.announced.learn("policy", PolicyVersion(0, 10))
    rig.engine.clear()
    call = asyncio.create_task(rig.call())
    await rig.called.wait()
    rig.announced.learn("policy", PolicyVersion(0, 11))
    rig.engine.set()
    assert await call == 200
    (record,) = rig.records
    assert (record.policy.before, record.policy.after) == (PolicyVersion(0, 10), PolicyVersion(0, 11))
    assert {run.version for run in record.versions_of(record.choices[0])} == {PolicyVersion(0, 10)}


async def test_a_pause_is_its_own_policys_and_other_policies_keep_their_versions() -> None:
    judge = Route(policy="judge", trainable=False, version_source=VersionSource.ANNOUNCED)
    rig = Rig(CaptureSettings(routes={"judge": judge}))
    rig.announced.learn("judge", PolicyVersion(0, 1))
    await rig.post(f"{ADMIN}/pause", {"mode": "keep"})
    assert await rig.call({**ASK, "model": "judge"}) == 200
    await rig.post(f"{ADMIN}/resume", {"version": [0, 5]})
    assert await rig.call() == 200
    assert [record.policy.before.version for record in rig.records] == [1, 5]


async def test_a_call_that_has_waited_for_too_long_is_told_to_come_back_and_leaves_no_record() -> None:
    rig = Rig(pauses=PausedPolicies(0.01))
    await rig.post(f"{ADMIN}/pause", {})
    status, answer = await rig.post(CALL, ASK)
    assert (status, rig.asked, rig.records) == (503, [], [])
    assert "paused" in answer["error"]["message"]


async def test_a_second_pause_holds_calls_that_the_first_had_held() -> None:
    pauses = PausedPolicies(WAIT)
    pauses.pause("p", PauseMode.KEEP)
    waiting = asyncio.create_task(pauses.wait_until_resumed("p"))
    await asyncio.sleep(0)
    pauses.resume("p")
    pauses.pause("p", PauseMode.KEEP)
    await asyncio.sleep(0)
    assert not waiting.done()
    pauses.resume("p")
    await waiting


async def test_the_longest_wait_is_bounded() -> None:
    pauses = PausedPolicies(0.01)
    pauses.pause("p", PauseMode.KEEP)
    with pytest.raises(PausedTooLongError):
        await pauses.wait_until_resumed("p")


@pytest.mark.parametrize(("path", "body"), [("pause", {"mode": "stop"}), ("resume", {"verson": 1})])
async def test_what_is_not_understood_is_refused_with_advice(path: str, body: object) -> None:
    assert (await Rig().post(f"{ADMIN}/{path}", body))[0] == 422


async def test_only_the_administrator_steers() -> None:
    settings = CaptureSettings(api_keys={"alice": digest_of("a")}, admin_key_sha256=digest_of("admin"))
    rig = Rig(settings)
    for headers in ({}, {"authorization": "Bearer a"}):
        assert (await rig.post(f"{ADMIN}/pause", {}, **headers))[0] == 403
    assert not rig.pauses.status("policy")["paused"]
    assert (await rig.post(f"{ADMIN}/pause", {}, authorization="Bearer admin"))[0] == 200


async def test_a_salt_ties_the_engines_prefix_cache_to_the_version() -> None:
    rig = Rig(CaptureSettings(default_route=Route(cache_salt=True)))
    await rig.call()
    await rig.post(f"{ADMIN}/resume", {"version": [1, 7]})
    await rig.call()
    await rig.call({**ASK, "cache_salt": "mine"})
    salts = [orjson.loads(request.content)["cache_salt"] for request in rig.asked]
    assert salts == ["policy@0:0", "policy@1:7", "mine"]
    assert "cache_salt" in rig.records[0].metadata["added_fields"]


async def test_calls_at_version_zero_are_counted() -> None:
    rig = Rig()
    await rig.call()
    await rig.post(f"{ADMIN}/resume", {"version": [0, 1]})
    await rig.call()
    assert b'calls_at_version_zero_total{component="capture",policy="policy",prefix=""} 1.0' in rig.metrics.exposition()


CHUNK = {"id": "chat-1", "object": "chat.completion.chunk", "created": 1, "model": "m-test"}
PROMPT = [900, 903, 11]


def told(ids: list[int], finish: str | None = None, *, first: bool = False) -> dict[str, Any]:
    """A chunk of a chat's stream; the text of id n is ``<n>``."""
    choice = {
        "index": 0,
        "delta": {"content": "".join(f"<{number}>" for number in ids), **({"role": "assistant"} if first else {})},
        "logprobs": {"content": [{"token": f"<{number}>", "logprob": -number / 100} for number in ids]},
        "finish_reason": finish,
        "token_ids": ids,
    }
    return {**CHUNK, "choices": [choice], **({"prompt_token_ids": PROMPT} if first else {})}


def rest(ids: list[int], finish: str | None) -> dict[str, Any]:
    """A chunk of a completion's stream, or its body."""
    choice = {
        "index": 0,
        "text": "".join(f"<{number}>" for number in ids),
        "logprobs": {"tokens": [f"<{number}>" for number in ids], "token_logprobs": [-number / 100 for number in ids]},
        "finish_reason": finish,
        "token_ids": ids,
    }
    return {"id": "cmpl-9", "object": "text_completion", "model": "m-test", "choices": [choice]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def stream(*chunks: dict[str, Any]) -> httpx.Response:
    frames = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
    return httpx.Response(
        200, content=b"".join([*frames, b"data: [DONE]\n\n"]), headers={"content-type": "text/event-stream"}
    )


def whole(chunk: dict[str, Any], **more: Any) -> httpx.Response:
    """A chunk of a chat as a whole body."""
    (choice,) = chunk["choices"]
    message = {"role": "assistant", "content": choice.pop("delta")["content"]}
    return httpx.Response(200, json={**chunk, "choices": [{**choice, "message": message}], **more})


def aborted_stream(ids: list[int]) -> httpx.Response:
    return stream(told(ids, first=True), told([], "abort"), {**CHUNK, "choices": [], "usage": usage(3, len(ids))})


def rest_stream(ids: list[int], before: int, finish: str = "stop") -> httpx.Response:
    ended = {**rest([], None), "choices": [], "usage": usage(3 + before, len(ids))}
    return stream(rest(ids[:1], None), rest(ids[1:], finish), ended)


async def streamed(rig: Rig, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with AsgiCall(rig.app, "POST", CALL, {**body, "stream": True}) as call, asyncio.timeout(WAIT):
        raw = await call.rest()
    frames = [frame.removeprefix(b"data: ") for frame in raw.split(b"\n\n") if frame]
    assert frames[-1] == b"[DONE]" or b"error" in frames[-1], raw
    return [orjson.loads(frame) for frame in frames if frame != b"[DONE]"]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


async def resumed(rig: Rig, calls: int = 1) -> None:
    """Calls are in flight; the policy is paused and the engine breaks them off; then new weights are there."""
    async with asyncio.timeout(WAIT):
        while len(rig.asked) < calls:  # noqa: ASYNC110  # a turn of the loop is enough
            await asyncio.sleep(0)
    await rig.post(f"{ADMIN}/pause", {"mode": "abort_resume"})
    rig.engine.set()
    await rig.waiting(calls)
    assert len(rig.asked) == calls
    await rig.post(f"{ADMIN}/resume", {"version": [0, 8]})


def two_parts(record: CompletionRecord, ids: list[int], first: int) -> None:
    choice = record.choices[0]
    assert choice.token_ids is not None
    assert choice.token_ids.tolist() == ids
    assert choice.logprobs is not None
    assert choice.logprobs.tolist() == pytest.approx([-number / 100 for number in ids])
    assert (record.prompt_ids is not None and record.prompt_ids.tolist()) == PROMPT
    assert record.versions_of(choice) == ((PolicyVersion(0, 7), first), (PolicyVersion(0, 8), len(ids) - first))
    assert (record.policy.before, record.policy.after) == (PolicyVersion(0, 7), PolicyVersion(0, 8))
    assert record.usage_completion_tokens == len(ids)
    assert choice.trainable


async def test_streams_that_the_engine_breaks_off_go_on_with_the_new_weights_as_one_reply() -> None:
    rig = Rig()
    rig.announced.learn("policy", PolicyVersion(0, 7))
    rig.replies = [*(aborted_stream([21, 22]) for _ in range(4)), *(rest_stream([23, 24], 2) for _ in range(4))]
    rig.engine.clear()
    body = {**ASK, "temperature": 0.5, "stream_options": {"include_usage": True}}
    calls = [asyncio.create_task(streamed(rig, body)) for _ in range(4)]
    await resumed(rig, 4)
    for chunks in await asyncio.gather(*calls):
        assert text_of(chunks) == "<21><22><23><24>"
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        assert ends == ["stop"]
        assert {chunk["id"] for chunk in chunks} == {"chat-1"}
        assert chunks[-1]["usage"] == usage(3, 4)
    asked = orjson.loads(rig.asked[-1].content)
    assert rig.asked[-1].url.path == "/v1/completions"
    assert (asked["prompt"], asked["max_tokens"], asked["temperature"]) == ([*PROMPT, 21, 22], 14, 0.5)
    assert len({request.headers["x-request-id"] for request in rig.asked}) == 8
    for record in rig.records:
        two_parts(record, [21, 22, 23, 24], 2)
        assert record.metadata["parts"] == 2


async def test_a_whole_reply_goes_on_too() -> None:
    rig = Rig()
    rig.announced.learn("policy", PolicyVersion(0, 7))
    ended = httpx.Response(200, json={**rest([23, 24], "stop"), "usage": usage(5, 2)})
    rig.replies = [whole(told([21, 22], "abort", first=True), usage=usage(3, 2)), ended]
    rig.engine.clear()
    call = asyncio.create_task(rig.post(CALL, ASK))
    await resumed(rig)
    status, answer = await call
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "<21><22><23><24>")
    assert (answer["choices"][0]["finish_reason"], answer["usage"]) == ("stop", usage(3, 4))
    two_parts(rig.records[0], [21, 22, 23, 24], 2)


# B051
@pytest.mark.parametrize("as_stream", [True, False])
async def test_a_budget_that_is_used_up_ends_the_reply_as_truncated(as_stream: bool) -> None:
    rig = Rig()
    rig.pauses.pause("policy", PauseMode.ABORT_RESUME)
    rig.pauses.resume("policy")
    body = {**ASK, "max_tokens": 2}
    if as_stream:
        rig.replies = [aborted_stream([21, 22])]
        chunks = await streamed(rig, body)
        assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "length"
    else:
        rig.replies = [whole(told([21, 22], "abort", first=True))]
        assert (await rig.post(CALL, body))[1]["choices"][0]["finish_reason"] == "length"
    assert len(rig.asked) == 1
    (record,) = rig.records
    assert (record.choices[0].finish_reason, record.choices[0].trainable) == ("length", True)


@pytest.mark.parametrize("as_stream", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function"}], "tool_choice": "required"},
        {"presence_penalty": 0.5},
        {"n": 1, "guided_regex": "a"},
    ],
)
async def test_what_cannot_be_continued_is_an_error_and_its_beginning_is_kept(
    more: dict[str, Any], *, as_stream: bool
) -> None:
    rig = Rig()
    rig.pauses.pause("policy", PauseMode.ABORT_RESUME)
    rig.pauses.resume("policy")
    rig.replies = [aborted_stream([21, 22]) if as_stream else whole(told([21, 22], "abort", first=True))]
    if as_stream:
        assert "error" in (await streamed(rig, {**ASK, **more}))[-1]
    else:
        assert (await rig.post(CALL, {**ASK, **more}))[0] == 502
    (record,) = rig.records
    assert (record.status.value, len(rig.asked)) == ("incomplete", 1)
    assert "whole reply" in record.metadata["not_continued"]
    assert record.choices[0].token_ids is not None
    assert (record.choices[0].token_ids.tolist(), record.choices[0].trainable) == ([21, 22], False)


async def test_a_rest_that_never_comes_is_recorded_as_far_as_it_went() -> None:
    rig = Rig(pauses=PausedPolicies(0.05))
    rig.pauses.pause("policy", PauseMode.ABORT_RESUME)
    rig.pauses.resume("policy")
    rig.replies = [aborted_stream([21, 22]), httpx.Response(400, json={"error": {"message": "no"}})]
    assert "error" in (await streamed(rig, ASK))[-1]
    rig.replies = [aborted_stream([21, 22])]
    rig.engine.clear()
    call = asyncio.create_task(streamed(rig, ASK))
    await asyncio.sleep(0)
    rig.called.clear()
    await rig.called.wait()
    rig.pauses.pause("policy", PauseMode.ABORT_RESUME)
    rig.engine.set()
    assert "error" in (await call)[-1]
    for record in rig.records:
        assert record.status.value == "incomplete"
        assert record.choices[0].token_ids is not None
        assert record.choices[0].token_ids.tolist() == [21, 22]


# B051
async def test_a_reply_can_be_broken_off_twice() -> None:
    rig = Rig()
    rig.announced.learn("policy", PolicyVersion(0, 7))
    rig.pauses.pause("policy", PauseMode.ABORT_RESUME)
    rig.pauses.resume("policy")
    rig.replies = [aborted_stream([21]), rest_stream([22, 23], 1, "abort"), rest_stream([24, 25], 3)]
    assert text_of(await streamed(rig, ASK)) == "<21><22><23><24><25>"
    asked = [orjson.loads(request.content) for request in rig.asked[1:]]
    assert [(item["prompt"][3:], item["max_tokens"]) for item in asked] == [([21], 15), ([21, 22, 23], 13)]
    assert rig.records[0].usage_completion_tokens == 5


async def test_a_limit_that_the_client_does_not_say_stays_the_models() -> None:
    rig = Rig()
    rig.pauses.pause("policy", PauseMode.ABORT_RESUME)
    rig.pauses.resume("policy")
    rig.replies = [aborted_stream([21]), rest_stream([22, 23], 1)]
    await streamed(rig, {"model": "m-test", "messages": ASK["messages"]})
    assert orjson.loads(rig.asked[1].content)["max_tokens"] is None


async def test_without_such_an_update_an_abort_is_told_as_it_is() -> None:
    rig = Rig(replies=[aborted_stream([21])])
    chunks = await streamed(rig, ASK)
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]][-1] == "abort"
    assert rig.records[0].choices[0].untrainable_reason == "partial:abort"


def cached(tokens: int) -> httpx.Response:
    more = {"prompt_tokens_details": {"cached_tokens": tokens}}
    return httpx.Response(200, json={**REPLY, "usage": {**REPLY["usage"], **more}})


@pytest.mark.parametrize(
    ("route", "reset", "marked"),
    [(Route(), False, True), (Route(), True, False), (Route(cache_salt=True), False, False)],
)
async def test_a_prompt_from_a_cache_that_may_be_older_than_the_weights_is_marked(
    route: Route, *, reset: bool, marked: bool
) -> None:
    rig = Rig(CaptureSettings(default_route=route), replies=[cached(0), cached(8)])
    rig.announced.learn("policy", PolicyVersion(0, 1))
    await rig.call()
    await rig.post(f"{ADMIN}/resume", {"version": [0, 2], "cache_reset": reset})
    await rig.call()
    first, second = rig.records
    assert "kv_maybe_stale" not in first.metadata
    assert second.metadata.get("kv_maybe_stale", False) is marked
    assert second.metadata.get("cached_tokens", 8) == 8
