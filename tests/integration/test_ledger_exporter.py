"""The ledger's exporter as a process: what it says of tokens that nobody holds, and how it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from rollmill.codec import JSON, encode
from rollmill.models import Disposition, PolicyVersion, TokenRange, outcome
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import free_port
from rollmill.runtime.supervisor.stack import kafka_environment
from rollmill.settings import KafkaSettings
from rollmill.testing.topic_log import produce
from rollmill.topics import OUTCOMES

pytestmark = pytest.mark.kafka

WAIT = 60.0
LOST = 'rollmill_ledger_imbalance_tokens{component="ledger",kind="lost",prefix="%s"}'


@asynccontextmanager
async def exporter(settings: KafkaSettings) -> AsyncIterator[tuple[asyncio.subprocess.Process, httpx.AsyncClient]]:
    port = free_port()
    command = ("-m", "rollmill.cli", "ledger", "--metrics-port", str(port), "--every", "0.2")
    process = await asyncio.create_subprocess_exec(sys.executable, *command, env=kafka_environment(settings))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http, asyncio.timeout(WAIT):
            yield process, http
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def shown(http: httpx.AsyncClient, path: str, wanted: str) -> str:
    """The page, once ``wanted`` stands in it."""
    while True:
        try:
            page = (await http.get(path)).text
        except httpx.TransportError:
            page = ""
        if wanted in page:
            return page
        await asyncio.sleep(0.1)


async def test_tokens_that_nobody_holds_are_shown_and_the_exporter_ends_when_it_is_told(
    kafka_broker: EmbeddedKafka, topic_prefix: str
) -> None:
    settings = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=2)
    await apply_topics(settings)
    async with exporter(settings) as (process, http):
        await shown(http, "/ready", '"ready":true')
        lost = LOST % topic_prefix
        assert f"{lost} 0.0" in (await http.get("/metrics")).text
        units = (TokenRange("c1", 0, 0, 7, PolicyVersion(0, 1)),)
        word = outcome(Disposition.CAPTURED, stage="test", session_id="s1", attempt=1, units=units)
        await produce(settings, OUTCOMES, [("s1", encode(word, JSON))])
        page = await shown(http, "/metrics", f"{lost} 7.0")
        assert f'rollmill_ledger_captured_tokens{{component="ledger",prefix="{topic_prefix}"}} 7.0' in page
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
