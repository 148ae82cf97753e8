"""What capture costs: the same streams straight from a replaying engine and through capture, with Kafka running.

Open loop: calls begin at even intervals, paced as an engine samples. ``added``: time to the first token through the
proxy minus the same without it, at the same quantile. ``ack``: how much longer the end of the reply takes, which is
held until Kafka has the record. Saturated: as many fast calls as go through; requests per second of the proxy's own CPU
time, so that what else runs on the machine does not count. Beside it LiteLLM's proxy under the same load, which records
nothing.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from benchmarks.litellm_proxy import KEY, MissingError, litellm_proxy
from benchmarks.load import Endpoint, Measured, closed_loop, open_loop
from benchmarks.processes import Running, replay_engine
from benchmarks.replay import STREAM_SECONDS
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import BrokerConfig, EmbeddedKafka
from rollmill.runtime.supervisor import free_port
from rollmill.settings import KafkaSettings
from rollmill.testing.processes import service_process

LEVELS = (1, 16, 64, 256)
SECONDS = 6.0
SESSIONS = 256
WORKERS = 64
PROMPT = "word " * 1000

Path_ = Callable[[int], str]


def measure() -> dict[str, Any]:
    return asyncio.run(_measure())


async def _measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rollmill-bench-") as name:
        directory = Path(name)
        async with EmbeddedKafka(directory / "kafka", BrokerConfig()) as kafka, replay_engine() as engine:
            direct = await _levels(engine, lambda _: "/v1/chat/completions")
            async with _capture(kafka, engine, directory) as capture:
                captured = await _levels(capture, _session_path)
                saturated = await _saturated(capture, _session_path)
            rival = await _rival(engine, directory)
    return _report(direct, captured, saturated, rival)


@asynccontextmanager
async def _capture(kafka: EmbeddedKafka, engine: Running, directory: Path) -> AsyncIterator[Running]:
    settings, port = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, prefix="bench."), free_port()
    await apply_topics(settings)
    environment = {
        "ROLLMILL_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ROLLMILL_PREFIX": settings.prefix,
        "ROLLMILL_PORT": str(port),
        "ROLLMILL_UPSTREAM": f"http://127.0.0.1:{engine.port}",
        "ROLLMILL_SPOOL_DIR": str(directory / "spool"),
        "ROLLMILL_PROBE": "false",
    }
    async with service_process("rollmill_capture", environment) as service:
        await service.wait_for_log(b"capture listens")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for number in range(SESSIONS):
                (await http.post("/v1/sessions", json={"session_id": f"s{number}"})).raise_for_status()
        yield Running(service.process.pid, port)


async def _rival(engine: Running, directory: Path) -> dict[str, Any]:
    """LiteLLM's figures, or why there are none."""
    try:
        async with AsyncExitStack() as stack:
            upstream = f"http://127.0.0.1:{engine.port}"
            proxy = await stack.enter_async_context(litellm_proxy(upstream, free_port(), directory))
            levels = await _levels(proxy, lambda _: "/v1/chat/completions")
            return {"levels": levels, "saturated": await _saturated(proxy, lambda _: "/v1/chat/completions")}
    except MissingError as error:
        return {"missing": str(error)}


async def _levels(server: Running, path: Path_) -> dict[int, Measured]:
    endpoint = Endpoint(server.port, lambda number: _request(path(number), "paced"))
    await endpoint.warm(max(LEVELS))
    found = {level: await open_loop(endpoint, level, STREAM_SECONDS, SECONDS) for level in LEVELS}
    endpoint.close()
    return found


async def _saturated(server: Running, path: Path_) -> dict[str, float]:
    endpoint = Endpoint(server.port, lambda number: _request(path(number), "fast"))
    await endpoint.warm(WORKERS)
    before = server.total_cpu_seconds
    measured = await closed_loop(endpoint, WORKERS, SECONDS)
    used = server.total_cpu_seconds - before
    endpoint.close()
    calls = len(measured.timings)
    return {
        "requests_per_cpu_second": round(calls / used, 1),
        "requests_per_second": round(calls / measured.seconds, 1),
        "failures": measured.failures,
    }


def _session_path(number: int) -> str:
    return f"/sessions/s{number % SESSIONS}/v1/chat/completions"


def _request(path: str, model: str) -> bytes:
    messages = [{"role": "user", "content": PROMPT}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 64, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\nauthorization: Bearer {KEY}\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


def _report(
    direct: dict[int, Measured],
    captured: dict[int, Measured],
    saturated: dict[str, float],
    rival: dict[str, Any],
) -> dict[str, Any]:
    levels = {str(level): _added(direct[level], captured[level]) for level in LEVELS}
    ratio = None
    litellm: dict[str, Any] = rival
    if "saturated" in rival:
        ratio = round(saturated["requests_per_cpu_second"] / rival["saturated"]["requests_per_cpu_second"], 2)
        theirs = {str(level): _added(direct[level], rival["levels"][level]) for level in LEVELS}
        litellm = {"levels": theirs, "saturated": rival["saturated"]}
    return {
        "added_p50_ms_64": levels["64"]["added_p50_ms"],
        "added_p99_ms_64": levels["64"]["added_p99_ms"],
        "ack_p50_ms": levels["64"]["ack_p50_ms"],
        "litellm_ratio": ratio,
        "levels": levels,
        "saturated": saturated,
        "litellm": litellm,
        "loop": "uvloop" if find_spec("uvloop") else "asyncio",
    }


def _added(direct: Measured, proxied: Measured) -> dict[str, float]:
    return {
        "added_p50_ms": round(proxied.first_ms(0.5) - direct.first_ms(0.5), 2),
        "added_p99_ms": round(proxied.first_ms(0.99) - direct.first_ms(0.99), 2),
        "ack_p50_ms": round(proxied.ending_ms(0.5) - direct.ending_ms(0.5), 2),
        "ack_p99_ms": round(proxied.ending_ms(0.99) - direct.ending_ms(0.99), 2),
        "calls": len(proxied.timings),
        "failures": proxied.failures,
    }
