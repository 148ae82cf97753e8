"""Weight updates: paused calls wait, calls get the version that sampled them, stale caches are told."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from rollmill.models import CompletionRecord, PolicyVersion, SessionEntry, SessionSpec, SessionState
from rollmill.telemetry.clock import ManualClock
from rollmill.telemetry.metrics import Metrics
from rollmill.testing.asgi import AsgiCall
from rollmill.testing.sink import MemorySink
from rollmill.topics import COMPLETIONS
from rollmill_capture.app import Parts, assemble
from rollmill_capture.auth import digest_of
from rollmill_capture.pause import PausedTooLongError, PauseMode, Pauses
from rollmill_capture.sessions import SessionTable
from rollmill_capture.settings import CaptureSettings, Route, VersionSource
from rollmill_capture.upstream import Upstream
from rollmill_capture.versions import Announced

WIRE = Path(__file__).parents[2] / "fixtures" / "wire"
REPLY = orjson.loads((WIRE / "vllm_chat_nonstream_token_ids.json").read_bytes())
ASK = {"model": "m-test", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 16}
CALL = "/sessions/s1/v1/chat/completions"
ADMIN = "/admin/policies/policy"
WAIT = 5.0


class Here:
    async def end_offsets(self) -> dict[int, int]:
        return {}

    async def reached(self, ends: object) -> None:
        del ends


@dataclass
class Rig:
    """Capture with one open session; the engine answers what ``replies`` says, once ``engine`` is set."""

    settings: CaptureSettings = field(default_factory=CaptureSettings)
    pauses: Pauses = field(default_factory=lambda: Pauses(WAIT))
    replies: list[httpx.Response] = field(default_factory=list)
    sink: MemorySink = field(default_factory=MemorySink)
    announced: Announced = field(default_factory=Announced)
    metrics: Metrics = field(default_factory=lambda: Metrics("capture"))
    engine: asyncio.Event = field(default_factory=asyncio.Event)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[httpx.Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine.set()
        table = SessionTable()
        table.apply("s1", SessionEntry(session_id="s1", state=SessionState.OPEN, spec=SessionSpec(), opened_at=1.0))
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.app = assemble(
            Parts(
                settings=self.settings,
                sessions=table,
                position=Here(),
                announced=self.announced,
                sink=self.sink,
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
        return [item for item in self.sink.of(COMPLETIONS) if isinstance(item, CompletionRecord)]

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
    rig = Rig(announced=Announced())
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
    rig = Rig(pauses=Pauses(0.01))
    await rig.post(f"{ADMIN}/pause", {})
    status, answer = await rig.post(CALL, ASK)
    assert (status, rig.asked, rig.records) == (503, [], [])
    assert "paused" in answer["error"]["message"]


async def test_a_second_pause_holds_calls_that_the_first_had_held() -> None:
    pauses = Pauses(WAIT)
    pauses.pause("p", PauseMode.KEEP)
    waiting = asyncio.create_task(pauses.opened("p"))
    await asyncio.sleep(0)
    pauses.resume("p")
    pauses.pause("p", PauseMode.KEEP)
    await asyncio.sleep(0)
    assert not waiting.done()
    pauses.resume("p")
    await waiting


async def test_the_longest_wait_is_bounded() -> None:
    pauses = Pauses(0.01)
    pauses.pause("p", PauseMode.KEEP)
    with pytest.raises(PausedTooLongError):
        await pauses.opened("p")


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
    assert b'calls_at_version_zero_total{policy="policy"} 1.0' in rig.metrics.exposition()
