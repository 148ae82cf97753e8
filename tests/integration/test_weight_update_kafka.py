"""A trainer's weight update through capture, on Apache Kafka: pause, load, resume, announce."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rollmill.models import CompletionRecord, PolicyVersion
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.kafka.global_table import GlobalTable
from rollmill.runtime.supervisor import free_port
from rollmill.settings import KafkaSettings
from rollmill.testing.processes import service_process
from rollmill.topics import COMPLETIONS
from rollmill.trainer import Captures, PolicyPublisher
from rollmill_capture.http.server import serve
from rollmill_capture.settings import CaptureSettings

pytestmark = pytest.mark.kafka

WAIT = 60.0
CALL = "/sessions/s1/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}], "max_tokens": 4}
REPLY = {
    "id": "r1",
    "model": "m",
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "4"},
            "finish_reason": "stop",
            "token_ids": [4],
            "logprobs": {"content": [{"token": "4", "logprob": -0.5}]},
        }
    ],
    "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3},
}


@asynccontextmanager
async def engine() -> AsyncIterator[tuple[str, list[float]]]:
    """Answers at once; and the times when it was asked."""
    asked: list[float] = []

    async def answer(_: Request) -> JSONResponse:
        asked.append(asyncio.get_running_loop().time())
        return JSONResponse(REPLY)

    app, stop = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])]), asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.create_task(serve(app, listener, CaptureSettings(), stop))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        stop.set()
        await running


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    made = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=4)
    await apply_topics(made)
    return made


async def versions(settings: KafkaSettings) -> list[PolicyVersion]:
    found: list[PolicyVersion] = []

    def take(_: str, event: object) -> None:
        if isinstance(event, CompletionRecord):
            found.append(event.policy.before)

    reader, stop = GlobalTable(KafkaClients(settings), settings, COMPLETIONS, take, lambda *_: None), asyncio.Event()
    running = asyncio.create_task(reader.run(stop))
    await reader.caught_up()
    stop.set()
    await running
    return found


async def test_calls_wait_while_the_engines_load_and_have_the_new_version_after_it(settings: KafkaSettings) -> None:
    port, loading, loaded = free_port(), threading.Event(), threading.Event()
    environment = {
        "ROLLMILL_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ROLLMILL_PREFIX": settings.prefix,
        "ROLLMILL_PARTITIONS": str(settings.partitions),
        "ROLLMILL_PORT": str(port),
        "ROLLMILL_PROBE": "false",
    }

    def load() -> None:
        loading.set()
        assert loaded.wait(WAIT)

    def update(version: int) -> None:
        with PolicyPublisher(settings=settings, captures=Captures([f"http://127.0.0.1:{port}"])) as publisher:
            publisher.update(version, load)

    async with (
        asyncio.timeout(2 * WAIT),
        engine() as (url, asked),
        service_process("rollmill_capture", {**environment, "ROLLMILL_UPSTREAM": url}) as capture,
    ):
        await capture.wait_for_log(b"capture listens")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT) as http:
            (await http.post("/v1/sessions", json={"session_id": "s1"})).raise_for_status()
            (await http.post(CALL, json=ASK)).raise_for_status()
            updating = asyncio.create_task(asyncio.to_thread(update, 1))
            await asyncio.to_thread(partial(loading.wait, WAIT))
            calls = [asyncio.create_task(http.post(CALL, json=ASK)) for _ in range(3)]
            while (await http.get("/admin/policies/policy/status")).json()["waiting"] < len(calls):
                pass
            assert len(asked) == 1
            loaded.set()
            assert [(await call).status_code for call in calls] == [200] * 3
            await updating
    assert await versions(settings) == [PolicyVersion(0, 0), *[PolicyVersion(0, 1)] * 3]
