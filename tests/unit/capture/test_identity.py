"""Whose call is it, may it, and is it the same one again: keys, tokens, and clients that retry."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from pydantic import ValidationError

from rollmill.errors import ConfigurationError
from rollmill.models import CallStatus, CompletionRecord
from rollmill.runtime.telemetry.clock import ManualClock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.testing.http.asgi import AsgiCall
from rollmill.testing.memory_event_writer import MemoryEventWriter
from rollmill.testing.tables import CaughtUp
from rollmill.topics import COMPLETIONS, SESSIONS
from rollmill_capture.coordination.policies import AnnouncedVersions
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.http.keys import Keys, accepted_keys, digest_of
from rollmill_capture.http.requests import presented_keys
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream

WIRE = Path(__file__).parents[2] / "fixtures" / "wire"
REPLY = orjson.loads((WIRE / "vllm_chat_nonstream_token_ids.json").read_bytes())
ASK = {"model": "m-test", "messages": [{"role": "user", "content": "2+2?"}]}
WAIT = 5.0
ALICE, BOB, ADMIN = "key-of-alice", "key-of-bob", "key-of-the-admin"
KEYS = {"alice": digest_of(ALICE), "bob": digest_of(BOB)}
KEYED: dict[str, Any] = {"host": "0.0.0.0", "api_keys": KEYS, "unprefixed_tenant": "alice"}
CALL = "/v1/chat/completions"


@dataclass
class Rig:
    settings: CaptureSettings = field(default_factory=lambda: CaptureSettings(**KEYED))
    event_writer: MemoryEventWriter = field(default_factory=MemoryEventWriter)
    table: SessionTable = field(default_factory=SessionTable)
    metrics: Metrics = field(default_factory=lambda: Metrics("capture"))
    engine: asyncio.Event = field(default_factory=asyncio.Event)
    called: asyncio.Event = field(default_factory=asyncio.Event)
    status: int = 200
    asked: list[httpx.Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine.set()
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.app = assemble(
            CaptureParts(
                settings=self.settings,
                sessions=self.table,
                position=CaughtUp(),
                announced=AnnouncedVersions(),
                event_writer=self.event_writer,
                upstream=Upstream(client),
                clock=ManualClock(),
                metrics=self.metrics,
            )
        )

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        self.called.set()
        await self.engine.wait()
        return httpx.Response(self.status, json=REPLY)

    @asynccontextmanager
    async def request(self, method: str, path: str, body: object = None, **headers: str) -> AsyncIterator[AsgiCall]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with AsgiCall(self.app, method, path, body, named) as call, asyncio.timeout(WAIT):
            yield call

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        async with self.request("POST", path, body, **headers) as call:
            answer = await call.json()
        return call.status, answer

    async def open(self, key: str | None, **spec: Any) -> dict[str, Any]:
        status, opened = await self.post("/v1/sessions", spec, **bearer(key))
        assert status in (200, 201), opened
        found: dict[str, Any] = opened
        return found

    @property
    def records(self) -> list[CompletionRecord]:
        return [item for item in self.event_writer.of(COMPLETIONS) if isinstance(item, CompletionRecord)]


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


async def test_a_tenants_key_opens_a_session_that_says_whose_it_is_and_only_a_digest_is_written_down() -> None:
    rig = Rig()
    opened = await rig.open(ALICE, session_id="s1", metadata={"tenant": "bob", "note": "x"})
    (entry,) = rig.event_writer.of(SESSIONS)
    assert entry.spec.metadata == {"tenant": "alice", "note": "x"}
    assert entry.token == digest_of(opened["api_key"])
    assert all(opened["api_key"].encode() not in item.value for item in rig.event_writer.appended)


@pytest.mark.parametrize("key", [None, "", "nonsense", KEYS["alice"], ADMIN])
async def test_nobody_opens_a_session_without_a_tenants_key(key: str | None) -> None:
    rig = Rig()
    status, answer = await rig.post("/v1/sessions", {}, **bearer(key))
    assert (status, rig.event_writer.appended) == (401, [])
    assert "tenant" in answer["error"]["message"]


async def test_a_sessions_token_alone_names_it_and_admits_to_it() -> None:
    rig = Rig()
    token = (await rig.open(ALICE, session_id="s1"))["api_key"]
    for headers in (bearer(token), {"x_api_key": token}, {"x_goog_api_key": token}):
        assert (await rig.post(CALL, ASK, **headers))[0] == 200
    assert (await rig.post(f"{CALL}?key={token}", ASK))[0] == 200
    assert {record.session_id for record in rig.records} == {"s1"}
    assert (await rig.post("/v1/sessions/s1/close", {}, **bearer(token)))[0] == 200


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("s1", 401), ("rm-guess", 401), (BOB, 404), (ALICE, 200)])
@pytest.mark.parametrize("path", ["/sessions/s1/v1/chat/completions", "/v1/sessions/s1/close"])
async def test_a_session_is_its_tenants_and_nobody_elses(path: str, key: str | None, status: int) -> None:
    rig = Rig()
    await rig.open(ALICE, session_id="s1")
    body = ASK if path.endswith("completions") else {}
    assert (await rig.post(path, body, **bearer(key)))[0] == status
    assert len(rig.asked) == (status == 200 and body is ASK)


async def test_the_token_of_one_session_opens_no_other_and_ends_with_its_attempt() -> None:
    rig = Rig()
    first = (await rig.open(ALICE, session_id="s1"))["api_key"]
    other = (await rig.open(ALICE, session_id="s2"))["api_key"]
    assert (await rig.post("/sessions/s1/v1/chat/completions", ASK, **bearer(other)))[0] == 401
    second = (await rig.open(ALICE, session_id="s1", attempt=2))["api_key"]
    assert (await rig.post(CALL, ASK, **bearer(first)))[0] == 401
    assert (await rig.post(CALL, ASK, **bearer(second)))[0] == 200
    assert rig.records[-1].attempt == 2


async def test_opening_again_tells_the_same_token_and_after_a_restart_a_new_one() -> None:
    rig = Rig()
    first = (await rig.open(ALICE, session_id="s1"))["api_key"]
    assert (await rig.open(ALICE, session_id="s1"))["api_key"] == first
    again = Rig(table=rig.table)
    renewed = (await again.open(ALICE, session_id="s1"))["api_key"]
    assert renewed != first
    assert (await again.post(CALL, ASK, **bearer(renewed)))[0] == 200
    assert (await again.post(CALL, ASK, **bearer(first)))[0] == 401


async def test_on_loopback_no_key_is_asked_for_and_an_id_will_do() -> None:
    rig = Rig(CaptureSettings())
    token = (await rig.open(None, session_id="s1"))["api_key"]
    for key in (token, "s1"):
        assert (await rig.post(CALL, ASK, **bearer(key)))[0] == 200
    assert (await rig.post("/sessions/s1/v1/chat/completions", ASK, **bearer("none")))[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "capture.example"])
def test_without_keys_capture_refuses_to_listen_to_other_machines(host: str) -> None:
    with pytest.raises(ValidationError, match="ROLLMILL_API_KEYS"):
        CaptureSettings(host=host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_it_starts_without(host: str) -> None:
    assert not accepted_keys(CaptureSettings(host=host)).required


def test_keys_come_from_a_file_too_and_must_be_digests(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(orjson.dumps({"carol": digest_of("key-of-carol")}))
    keys = accepted_keys(CaptureSettings(host="0.0.0.0", api_keys=KEYS, api_keys_file=file))
    assert [keys.tenant_of(key) for key in (ALICE, "key-of-carol", "x", None)] == ["alice", "carol", None, None]
    file.write_text('{"carol": "key-of-carol"}')
    with pytest.raises(ConfigurationError, match="SHA-256"):
        accepted_keys(CaptureSettings(host="0.0.0.0", api_keys_file=file))
    with pytest.raises(ValidationError, match="SHA-256"):
        CaptureSettings(api_keys={"alice": ALICE})


def test_the_administrator_is_everybody_only_where_no_keys_are_asked_for() -> None:
    assert Keys({}, None).is_admin(None)
    assert not Keys(KEYS, None).is_admin(ALICE)
    keys = Keys(KEYS, digest_of(ADMIN))
    assert [keys.is_admin(key) for key in (ADMIN, ALICE, "", None)] == [True, False, False, False]


def test_a_key_is_read_wherever_an_sdk_puts_it() -> None:
    assert presented_keys({"authorization": "bearer k1", "x-api-key": "k2"}, {}) == ("k1", "k2")
    assert presented_keys({"api-key": "k2", "x-api-key": "k2"}, {"key": "k3"}) == ("k2", "k3")
    assert presented_keys({"authorization": "Basic k1"}, {"key": "k3"}) == ("k3",)
    assert presented_keys({"authorization": "Bearer "}, {}) == ()


async def test_a_retry_of_a_running_call_waits_and_gets_its_reply_without_a_second_call() -> None:
    rig = Rig(CaptureSettings())
    await rig.open(None, session_id="s1")
    rig.engine.clear()
    headers = {"idempotency_key": "k1", **bearer("s1")}
    async with rig.request("POST", CALL, ASK, **headers) as first:
        await rig.called.wait()
        async with rig.request("POST", CALL, ASK, **headers) as second:
            rig.engine.set()
            answers = [await first.json(), await second.json()]
    assert answers[0] == answers[1]
    assert (len(rig.asked), len(rig.records)) == (1, 1)


async def test_a_client_that_leaves_and_retries_gets_the_reply_of_its_first_call() -> None:
    rig = Rig(CaptureSettings())
    await rig.open(None, session_id="s1")
    rig.engine.clear()
    headers = {"idempotency_key": "k1", **bearer("s1")}
    async with rig.request("POST", CALL, ASK, **headers) as first:
        await rig.called.wait()
        first.leave()
        async with rig.request("POST", CALL, ASK, **headers) as second:
            rig.engine.set()
            assert (await second.json())["choices"]
    assert len(rig.asked) == 1
    assert [record.status for record in rig.records] == [CallStatus.OK]


async def test_after_its_end_a_reply_is_played_again_and_other_keys_and_sessions_are_other_calls() -> None:
    rig = Rig(CaptureSettings())
    await rig.open(None, session_id="s1")
    await rig.open(None, session_id="s2")
    for key, session in (("k1", "s1"), ("k1", "s1"), ("k2", "s1"), ("k1", "s2")):
        status, answer = await rig.post(CALL, ASK, idempotency_key=key, **bearer(session))
        assert (status, answer["id"]) == (200, REPLY["id"])
    assert [(record.session_id, record.metadata["idempotency_key"]) for record in rig.records] == [
        ("s1", "k1"),
        ("s1", "k2"),
        ("s2", "k1"),
    ]


async def test_a_call_that_failed_is_made_again_as_the_next_attempt() -> None:
    rig = Rig(CaptureSettings())
    await rig.open(None, session_id="s1")
    rig.status = 500
    headers = {"idempotency_key": "k1", "x_request_id": "r1", "x_rollmill_attempt": "9", **bearer("s1")}
    assert (await rig.post(CALL, ASK, **headers))[0] == 500
    rig.status = 200
    assert (await rig.post(CALL, ASK, **headers))[0] == 200
    assert [record.metadata["attempt"] for record in rig.records] == [1, 2]
    assert {record.metadata["client_request_id"] for record in rig.records} == {"r1"}
    upstream_ids = [request.headers["x-request-id"] for request in rig.asked]
    assert len(set(upstream_ids)) == 2


# B013
async def test_the_same_request_id_twice_is_two_calls_with_ids_of_their_own() -> None:
    rig = Rig(CaptureSettings())
    await rig.open(None, session_id="s1")
    rig.engine.clear()
    async with (
        rig.request("POST", CALL, ASK, x_request_id="r1", **bearer("s1")) as first,
        rig.request("POST", CALL, ASK, x_request_id="r1", x_stainless_retry_count="1", **bearer("s1")) as second,
    ):
        rig.engine.set()
        assert [first.status, second.status] == [0, 0]
        await first.json()
        await second.json()
    assert len({request.headers["x-request-id"] for request in rig.asked}) == 2
    assert sorted(record.metadata.get("client_retries", "0") for record in rig.records) == ["0", "1"]


async def test_a_replay_is_for_those_who_may_call_and_ends_with_the_session() -> None:
    rig = Rig()
    token = (await rig.open(ALICE, session_id="s1"))["api_key"]
    path = "/sessions/s1/v1/chat/completions"
    assert (await rig.post(path, ASK, idempotency_key="k1", **bearer(token)))[0] == 200
    assert (await rig.post(path, ASK, idempotency_key="k1"))[0] == 401
    assert (await rig.post("/v1/sessions/s1/close", {}, **bearer(token)))[0] == 200
    assert (await rig.post(path, ASK, idempotency_key="k1", **bearer(token)))[0] == 409


async def test_replies_are_kept_for_a_bounded_time_and_room() -> None:
    rig = Rig(CaptureSettings(replay_bytes=1))
    await rig.open(None, session_id="s1")
    for _ in range(2):
        await rig.post(CALL, ASK, idempotency_key="k1", **bearer("s1"))
    assert len(rig.asked) == 2
