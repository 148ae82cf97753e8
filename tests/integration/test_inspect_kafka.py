"""``rollmill inspect`` on Apache Kafka: one partition of ``completions``, and what ``built`` holds of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import pytest
from aiokafka import AIOKafkaProducer

from rollmill.cli.inspect.command import SessionQuery, find_sessions
from rollmill.cli.inspect.views import SessionView
from rollmill.codec import JSON, MSGPACK, encode
from rollmill.errors import InvalidInputError
from rollmill.models import CallKind, CompletionEvent, SessionClosed, SessionOpened, Trajectory
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.settings import KafkaSettings
from rollmill.strategies import builder_registry
from rollmill.testing.samples.sessions import assistant, completion, session_of, user
from rollmill.topics import BUILT, COMPLETIONS, Topic, partition_of

pytestmark = pytest.mark.kafka

SESSION, NEIGHBOUR, ELSEWHERE = "s1", "s2", "s0"
"""Of four partitions, the first two share one, and the third lies in another."""

ASK = [user("?")]
AGAIN = [*ASK, assistant("ab"), user("and?")]


def events() -> list[CompletionEvent]:
    """A drifted reply that two calls go on from, an auxiliary call."""
    return [
        SessionOpened(session_id=SESSION, at=1.0),
        completion("c1", [1, 2], [5, 6, 9], at=2.0, messages=ASK, text="ab"),
        completion("title", [1, 30], [8, 9], at=2.5, kind=CallKind.AUX),
        completion("c2", [1, 2, 8, 9, 3], [7, 9], at=3.0, messages=AGAIN, text="g"),
        completion("c3", [1, 2, 8, 9, 4], [7, 7, 9], at=4.0, messages=AGAIN, text="gg"),
        SessionClosed(session_id=SESSION, at=5.0),
    ]


def trajectory() -> Trajectory:
    """What another configuration than the default made of the calls."""
    builder = builder_registry().find("per_request")()
    calls = [event for event in events() if event.type == "completion"]
    return builder.build(session_of(*calls))


async def send(
    producer: AIOKafkaProducer, settings: KafkaSettings, topic: Topic, key: str, values: Sequence[bytes]
) -> None:
    for value in values:
        await producer.send_and_wait(topic.full_name(settings.prefix), value, key.encode())


async def inspected(settings: KafkaSettings, wanted: SessionQuery) -> tuple[list[SessionView], tuple[str, ...]]:
    return await asyncio.to_thread(find_sessions, wanted, settings)


async def command(settings: KafkaSettings, *arguments: str) -> tuple[int | None, str, str]:
    where = ("--bootstrap-servers", settings.bootstrap_servers, "--prefix", settings.prefix)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmill.cli", "inspect", *arguments, *where),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    settings = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=4)
    await apply_topics(settings, [COMPLETIONS, BUILT])
    return settings


async def test_a_session_is_read_from_its_partition(settings: KafkaSettings) -> None:
    assert partition_of(SESSION.encode(), 4) == partition_of(NEIGHBOUR.encode(), 4)
    first, *rest = [encode(event, JSON) for event in events()]
    async with KafkaClients(settings).producer() as producer:
        await send(producer, settings, COMPLETIONS, SESSION, [first, b"{", *rest])
        await send(producer, settings, COMPLETIONS, NEIGHBOUR, [b"no concern of ours"])
    ((view,), problems) = await inspected(settings, SessionQuery(SESSION))
    assert (view.status, view.open, view.from_log) == ("COMPLETED", False, False)
    assert (view.calls, view.traces_in_all, view.captured, view.trained) == (4, 2, 10, 8)
    (trace,) = view.traces
    assert [turn.completion_id for turn in trace.turns] == ["c1", "c2"]
    assert trace.turns[0].repaired
    assert [branch.break_reason for branch in trace.turns[0].branches] == ["fork"]
    assert [(item.completion_id, item.reason) for item in view.left_out] == [("title", "aux")]
    assert len(problems) == 1
    assert problems[0].startswith("completions, partition ")
    assert "offset 1: malformed" in problems[0]
    code, out, err = await command(settings, SESSION)
    assert code == 0
    assert "trace 2 of 2, from c1" in out
    assert "offset 1: malformed" in err


async def test_what_was_built_is_shown_unless_another_builder_is_asked_for(settings: KafkaSettings) -> None:
    async with KafkaClients(settings).producer(f"{settings.prefix}builder") as producer, producer.transaction():
        await send(producer, settings, COMPLETIONS, SESSION, [encode(event, MSGPACK) for event in events()])
        await send(producer, settings, BUILT, SESSION, [encode(trajectory(), MSGPACK)])
    ((view,), problems) = await inspected(settings, SessionQuery(SESSION))
    assert (view.from_log, view.builder, view.traces_in_all, problems) == (True, "per_request", 3, ())
    ((again,), _) = await inspected(settings, SessionQuery(SESSION, builder="prefix_merging"))
    assert (again.from_log, again.traces_in_all) == (False, 2)


async def test_a_session_that_is_not_there(settings: KafkaSettings) -> None:
    with pytest.raises(InvalidInputError, match=f"no record of {ELSEWHERE}"):
        await inspected(settings, SessionQuery(ELSEWHERE))
    elsewhere = settings.model_copy(update={"prefix": "nowhere."})
    with pytest.raises(InvalidInputError, match=r"no topic nowhere\.completions"):
        await inspected(elsewhere, SessionQuery(SESSION))
