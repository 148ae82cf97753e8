"""The webhook on Apache Kafka: signed, at least once, in nobody's way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
import pytest

from rollmill.codec import MSGPACK, encode
from rollmill.models import EvaluatorSpec, SessionSpec
from rollmill.runtime.app import ServiceContext
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients, faststream_broker
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import free_port
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.signing import HEADER, verify
from rollmill.testing.http.stub_http_server import StubHttpServer, StubReply, StubRequest, stub_http_server
from rollmill.testing.samples.trajectories import sample_trajectory
from rollmill.testing.topic_log import produce, read
from rollmill.topics import BUILT, EVALUATIONS, TRAJECTORIES, partition_of
from rollmill_evaluator.app import build
from rollmill_evaluator.settings import EvaluatorSettings

pytestmark = pytest.mark.kafka

WAIT = 40.0
PACKED = (("content-type", MSGPACK.encode()),)
KEY = "a shared key"


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> EvaluatorSettings:
    made = EvaluatorSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        prefix=topic_prefix,
        partitions=2,
        commit_seconds=0.05,
        drain_seconds=4.0,
        evaluator_classes=("light",),
        webhook_signing_key=KEY,
        webhook_retry_seconds=0.05,
        webhook_longest_wait_seconds=0.2,
    )
    await apply_topics(made, [BUILT, EVALUATIONS, TRAJECTORIES])
    return made


@asynccontextmanager
async def serving(settings: EvaluatorSettings, url: str) -> AsyncIterator[ServiceContext]:
    """The evaluator's workers as they run in its process; drained at the end."""
    told = settings.model_copy(update={"webhook_url": url})
    context = ServiceContext(
        settings=told,
        clients=KafkaClients(told),
        broker=faststream_broker(told),
        clock=SystemClock(),
        stop=asyncio.Event(),
        metrics=Metrics("evaluator"),
        health=Health(),
    )
    await context.broker.start()
    working = asyncio.gather(*(worker(context) for worker in build(told).workers))
    try:
        yield context
    finally:
        context.stop.set()
        await asyncio.wait_for(working, WAIT)
        await context.broker.stop()


async def graded(settings: EvaluatorSettings, *names: str, revision: int = 0) -> None:
    records = [(name, encode(sample_trajectory(name, 0.5).replace(revision=revision))) for name in names]
    await produce(settings, TRAJECTORIES, records, headers=PACKED)


async def asked(service: StubHttpServer, done: int | Callable[[list[StubRequest]], bool]) -> list[StubRequest]:
    return await asyncio.to_thread(service.wait, done, WAIT)


def ids(requests: list[StubRequest]) -> list[str]:
    return [orjson.loads(request.body)["id"] for request in requests]


def counted(context: ServiceContext, name: str, **labels: str) -> float:
    return context.metrics.registry.get_sample_value(f"rollmill_{name}_total", labels) or 0.0


async def test_each_result_is_told_signed_and_a_restart_tells_only_what_is_new(settings: EvaluatorSettings) -> None:
    with stub_http_server(lambda _: StubReply()) as service:
        await graded(settings, "a", "b")
        async with serving(settings, service.url):
            first = await asked(service, 2)
        await graded(settings, "c", revision=1)
        async with serving(settings, service.url):
            requests = await asked(service, 3)
    assert sorted(ids(first)) == ["a:1:0", "b:1:0"]
    assert ids(requests)[2:] == ["c:1:1"]
    for request in requests:
        assert verify(KEY, request.body, request.headers[HEADER], time.time())
        told = orjson.loads(request.body)
        assert request.headers["idempotency-key"] == told["id"]
        assert (told["event"], told["reward"], told["status"]) == ("session_result", 0.5, "COMPLETED")
        assert (told["trace_rewards"], told["ungraded_reason"]) == ([0.5], None)


async def test_what_fails_is_told_again_what_is_refused_is_not(settings: EvaluatorSettings) -> None:
    failures = {"a:1:0": [503, 500, 429], "b:1:0": [410]}

    def script(request: StubRequest) -> StubReply:
        left = failures.get(orjson.loads(request.body)["id"], [])
        return StubReply(left.pop(0) if left else 200)

    with stub_http_server(script) as service:
        async with serving(settings, service.url) as context:
            await graded(settings, "a", "b", "c")
            requests = await asked(service, 6)
        assert sorted(ids(requests)) == ["a:1:0"] * 4 + ["b:1:0", "c:1:0"]
        assert counted(context, "webhook_notices", ended="taken") == 2
        assert counted(context, "webhook_notices", ended="refused") == 1
        assert counted(context, "webhook_failures") == 3


async def test_a_dead_target_holds_up_no_grading_and_is_told_everything_when_it_is_back(
    settings: EvaluatorSettings,
) -> None:
    port = free_port()
    tight = settings.model_copy(update={"webhook_records": 2})
    names = [f"s{number}" for number in range(6)]
    async with serving(tight, f"http://127.0.0.1:{port}") as context:
        await graded(tight, *names)
        spec = SessionSpec(evaluators=(EvaluatorSpec(strategy="session_completed"),))
        one = sample_trajectory("x").replace(spec=spec)
        await produce(tight, BUILT, [("x", encode(one))], headers=PACKED)
        assert len(await read(tight, EVALUATIONS, 1)) == 1
    assert counted(context, "webhook_failures") > 0
    # Nothing was delivered, so nothing is committed: the next process tells all of it.
    with stub_http_server(lambda _: StubReply(), port) as service:
        async with serving(tight, service.url):
            requests = await asked(service, 6)
    assert sorted(ids(requests)) == [f"{name}:1:0" for name in names]


async def test_a_notice_that_nobody_takes_is_given_up_and_the_next_ones_come(settings: EvaluatorSettings) -> None:
    hasty = settings.model_copy(update={"webhook_patience_seconds": 0.3, "webhook_records": 1})
    neighbours = [name for name in map("s{}".format, range(20)) if partition_of(name.encode(), 2) == 1]
    bad, good, *_ = neighbours

    def script(request: StubRequest) -> StubReply:
        return StubReply(503 if ids([request]) == [f"{bad}:1:0"] else 200)

    with stub_http_server(script) as service:
        await graded(hasty, bad, good)
        async with serving(hasty, service.url) as context:
            requests = await asked(service, lambda found: f"{good}:1:0" in ids(found))
    assert ids(requests)[-1] == f"{good}:1:0"
    assert set(ids(requests)[:-1]) == {f"{bad}:1:0"}
    assert counted(context, "webhook_notices", ended="given_up") == 1
    assert counted(context, "webhook_notices", ended="taken") == 1
