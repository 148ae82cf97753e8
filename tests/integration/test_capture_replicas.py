"""Two captures of one prefix, as processes, on Apache Kafka: what is told to one holds at both."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from rollmill.errors import EXIT_DRAINED
from rollmill.models import CompletionRecord, PolicyVersion
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import free_port
from rollmill.settings import KafkaSettings
from rollmill.testing.http.canned_server import CannedServer, canned_server
from rollmill.testing.http.scripted_engine import ScriptedEngine
from rollmill.testing.processes import ServiceProcess, service_process
from rollmill.testing.topic_log import read, read_all
from rollmill.topics import COMPLETIONS, SESSIONS

pytestmark = pytest.mark.kafka

WAIT = 60.0
ASK = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}


@dataclass(frozen=True)
class Replica:
    process: ServiceProcess
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any, status: int) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def call(self, session: str) -> int:
        return (await self.http.post(f"/sessions/{session}/v1/chat/completions", json=ASK)).status_code

    async def waiting(self, count: int) -> None:
        """Until so many calls stand before the gate."""
        while (await self.http.get("/admin/policies/policy/status")).json()["waiting"] < count:
            pass


@asynccontextmanager
async def replica(settings: KafkaSettings, engine: CannedServer, **more: str) -> AsyncIterator[Replica]:
    port = free_port()
    environment = {
        "ROLLMILL_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ROLLMILL_PREFIX": settings.prefix,
        "ROLLMILL_PARTITIONS": str(settings.partitions),
        "ROLLMILL_PORT": str(port),
        "ROLLMILL_UPSTREAM": engine.url,
        "ROLLMILL_PROBE": "false",
        **more,
    }
    async with (
        service_process("rollmill_capture", environment) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT) as http,
    ):
        await process.wait_for_log(b"capture listens")
        yield Replica(process, http)


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    made = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=4)
    await apply_topics(made)
    return made


async def test_pauses_hold_and_slots_count_at_all_replicas(settings: KafkaSettings) -> None:
    limits = json.dumps({"policy": {"max_staleness": 0, "per_version": 5}})
    group = {"group_size": 4, "group_id": "g"}
    async with (
        asyncio.timeout(2 * WAIT),
        canned_server(ScriptedEngine(("hello",)).answer) as engine,
        replica(settings, engine, ROLLMILL_ADMISSION=limits) as one,
        replica(settings, engine, ROLLMILL_ADMISSION=limits) as two,
    ):
        await one.post("/v1/sessions", {"session_id": "s1", **group}, 201)
        refused = await two.post("/v1/sessions", {"session_id": "t1", "group_size": 4, "group_id": "h"}, 429)
        assert "room for 1 more trajectories and the group needs 4: 4 are under way" in refused["error"]["message"]
        for number in (2, 3, 4):
            await two.post("/v1/sessions", {"session_id": f"s{number}", **group}, 201)
        await two.post("/v1/sessions", {"session_id": "alone"}, 201)
        await one.post("/v1/sessions", {"session_id": "too-many"}, 429)

        paused = await one.post("/admin/policies/policy/pause", {"mode": "wait"}, 200)
        assert (paused["in_flight"], paused["replicas_awaited"]) == (0, 0)
        calls = [asyncio.create_task(each.call(f"s{1 + place}")) for place, each in enumerate((one, two))]
        await asyncio.gather(one.waiting(1), two.waiting(1))
        assert engine.requests == []
        async with replica(settings, engine) as late:
            calls.append(asyncio.create_task(late.call("s3")))
            await late.waiting(1)
            await two.post("/admin/policies/policy/resume", {"version": [0, 3]}, 200)
            assert await asyncio.gather(*calls) == [200] * 3
            assert await late.process.stop() == EXIT_DRAINED
        # A replica that has left is not waited for.
        await two.post("/admin/policies/policy/pause", {"mode": "wait", "seconds": 5}, 200)
    records = [event for event in await read_all(settings, COMPLETIONS) if isinstance(event, CompletionRecord)]
    assert [record.policy.before for record in records] == [PolicyVersion(0, 3)] * 3


async def test_sessions_that_are_over_are_forgotten_by_all_and_stay_so(settings: KafkaSettings) -> None:
    short = {"ROLLMILL_SESSION_RETENTION_SECONDS": "3", "ROLLMILL_LATE_WINDOW_SECONDS": "1"}
    sessions = [f"s{number}" for number in range(20)]
    async with asyncio.timeout(2 * WAIT), canned_server(ScriptedEngine(("hello",)).answer) as engine:
        async with replica(settings, engine, **short) as one, replica(settings, engine, **short) as two:
            for session in (*sessions, "open"):
                await one.post("/v1/sessions", {"session_id": session}, 201)
            for session in sessions:
                assert (await two.post(f"/v1/sessions/{session}/close", {}, 200))["state"] == "closed"
            assert await one.call("s0") == 409
            for each in (one, two):
                for session in sessions:
                    while (await each.http.get(f"/v1/sessions/{session}")).status_code != 404:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                assert (await each.http.get("/v1/sessions/open")).status_code == 200
            assert await one.process.stop() == EXIT_DRAINED
            assert await two.process.stop() == EXIT_DRAINED
        async with replica(settings, engine, **short) as again:
            assert await again.call("s0") == 404
            assert await again.call("open") == 200
            # It keeps the house now, and finds what a dead replica has left to do.
            await again.post("/v1/sessions", {"session_id": "s0"}, 201)
            assert await again.call("s0") == 200
    topic = await read(settings, SESSIONS, len(sessions))
    tombstones = Counter((record.key or b"").decode() for record in topic if record.value is None)
    assert {key: count for key, count in tombstones.items() if not key.startswith("!")} == dict.fromkeys(sessions, 1)
