"""When a task may believe that it has read what there is."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest
from aiokafka import ConsumerRecord, TopicPartition

from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.stream.task_consumer import KEEP_UP_SECONDS, TaskConsumer
from rollmill.runtime.stream.task_identity import TaskIdentity
from rollmill.settings import ServiceSettings
from rollmill.topics import COMPLETIONS

PLACE = TopicPartition("rollmill.completions", 0)


Polls = list[tuple[int, int | None]]


class ScriptedConsumer:
    """A consumer that reads a log as it was written down beforehand: (records polled, high watermark) per poll.

    Without a high watermark the broker does not answer.
    """

    def __init__(self, polls: Polls) -> None:
        self._polls, self._position, self._high = deque(polls), 0, 0
        self._answered_at: float | None = None

    async def getmany(self, **_: Any) -> dict[TopicPartition, list[ConsumerRecord]]:
        count, high = self._polls.popleft()
        if high is not None:
            self._high, self._answered_at = high, time.time()
        first, self._position = self._position, self._position + count
        made = [record(offset) for offset in range(first, first + count)]
        return {PLACE: made} if made else {}

    async def position(self, _: TopicPartition) -> int:
        return self._position

    def highwater(self, _: TopicPartition) -> int:
        return self._high

    def last_poll_timestamp(self, _: TopicPartition) -> int | None:
        return None if self._answered_at is None else int(self._answered_at * 1000)


def record(offset: int) -> ConsumerRecord:
    return ConsumerRecord(PLACE.topic, 0, offset, 0, 0, b"k", b"v" * 10, None, 1, 10, ())


class Clients(KafkaClients):
    def __init__(self, consumer: ScriptedConsumer) -> None:
        self._consumer = consumer

    def consumer(self, **_: Any) -> Any:
        return self._consumer


def task_consumer(polls: Polls, **settings: Any) -> TaskConsumer:
    identity = TaskIdentity("builder", 0, "rollmill.", ((COMPLETIONS, PLACE),), TopicPartition("rollmill.s", 0))
    made = ServiceSettings(**settings)
    return TaskConsumer(identity, Clients(ScriptedConsumer(polls)), made, ClaimCheck.of(made))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = [1000.0]
    monkeypatch.setattr("rollmill.runtime.stream.task_consumer.uptime", lambda: found[0])
    monkeypatch.setattr(time, "time", lambda: found[0])
    return found


async def test_an_empty_poll_is_caught_up(now: list[float]) -> None:
    made = task_consumer([(2, 4), (0, 4)])
    await made.poll(10)
    assert [made.caught_up, made.keeps_up] == [False, False]
    await made.poll(10)
    assert [made.caught_up, made.keeps_up] == [True, True]
    now[0] += KEEP_UP_SECONDS
    assert not made.keeps_up


async def test_f8_an_empty_poll_of_a_broker_that_does_not_answer_shows_nothing(now: list[float]) -> None:
    made = task_consumer([(0, None), (2, 2), (0, 2), (0, None), (0, None), (0, 9)])
    await made.poll(10)
    assert [made.caught_up, made.keeps_up] == [False, False]
    for _ in range(2):
        await made.poll(10)
    assert [made.caught_up, made.keeps_up] == [True, True]
    for _ in range(2):
        now[0] += 86_400
        await made.poll(10)
        assert [made.caught_up, made.keeps_up] == [False, False]
    await made.poll(10)  # what the broker has is on its way
    assert made.keeps_up


async def test_a_busy_partition_keeps_up_although_it_never_polls_empty(now: list[float]) -> None:
    made = task_consumer([(5, 7), (5, 12), (5, 17), (1, 99), (1, 99)])
    for _ in range(2):
        await made.poll(10)
        now[0] += 1
    assert [made.caught_up, made.keeps_up] == [False, True]
    await made.poll(10)
    for _ in range(2):
        now[0] += KEEP_UP_SECONDS
        await made.poll(10)
    assert not made.keeps_up


async def test_a_batch_is_bounded_by_bytes_and_the_rest_waits_without_a_fetch() -> None:
    made = task_consumer([(5, 5)], poll_bytes=25)
    assert [raw.offset for raw in await made.poll(10)] == [0, 1, 2]
    assert made.reached() == {}
    assert [raw.offset for raw in await made.poll(10)] == [3, 4]
    assert made.reached() == {"completions/0": 5}
