"""Steps laid out again for another number of ranks: which layout is valid, and how to request one (rule R4)."""

from __future__ import annotations

import asyncio
import uuid

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from rollmill.codec import decode
from rollmill.errors import ConfigurationError, PoisonRecordError, RetryableError
from rollmill.models import StepsResharded, StepsReturned
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.telemetry.clock import Clock
from rollmill.settings import KafkaSettings
from rollmill.topics import ACKS, BATCHES
from rollmill.trainer.producer_records import to_producer_record

POLL_MS = 200
ANSWER_MARKER = b'"placed"'
"""Is in every answer of the batcher; most records of ``acks`` are no answer and need no decoding."""


async def read_placement(clients: KafkaClients, settings: KafkaSettings) -> StepsResharded | None:
    """The newest layout; None where no steps were ever returned."""
    newest: StepsResharded | None = None
    async with clients.reading(reset="earliest") as consumer:
        partition = _assigned(consumer, settings)
        end = (await consumer.end_offsets([partition]))[partition]
        while await consumer.position(partition) < end:
            for found in await _answers(consumer):
                newest = found if found.run == settings.run else newest
    return newest


async def return_steps(
    settings: KafkaSettings, clock: Clock, world_size: int, next_step: int | None, timeout_seconds: float
) -> StepsResharded:
    """Ask the batcher to lay out again the steps that are not acknowledged, and wait for its answer.

    ``next_step``: the first step, where it is an older one, such as a checkpoint's. Raises ConfigurationError for more
    ranks than partitions, RetryableError where no answer came in time.
    """
    if world_size > settings.batch_partitions:
        raise ConfigurationError(
            f"world size {world_size}: batches of prefix {settings.prefix!r} has {settings.batch_partitions} partitions"
        )
    clients = KafkaClients(settings)
    async with clients.reading(reset="earliest") as consumer:
        request = StepsReturned(
            run=settings.run,
            request_id=uuid.uuid4().hex,
            world_size=world_size,
            next_step=next_step,
            offsets=await _ends(consumer, settings),
            at=clock.now(),
        )
        partition = _assigned(consumer, settings)
        consumer.seek(partition, await _send(clients, settings, request))
        try:
            async with asyncio.timeout(timeout_seconds):
                return await _answer(consumer, request)
        except TimeoutError:
            raise RetryableError(_no_answer(request, timeout_seconds)) from None


def _no_answer(request: StepsReturned, seconds: float) -> str:
    return (
        f"the batcher of run {request.run!r} has not answered request {request.request_id} in {seconds:g} s: it "
        "answers once it runs, unless it has refused (`rollmill tail dead-letters --from-beginning` shows why)"
    )


async def _send(clients: KafkaClients, settings: KafkaSettings, request: StepsReturned) -> int:
    """Offset of the request."""
    record = to_producer_record(ACKS, request.request_id, request, settings)
    async with clients.producer() as producer:
        sent = await producer.send_and_wait(
            record.topic, record.value, record.key, partition=record.partition, headers=list(record.headers)
        )
    return int(sent.offset)


async def _answer(consumer: AIOKafkaConsumer, request: StepsReturned) -> StepsResharded:
    while True:
        for found in await _answers(consumer):
            if found.request_id == request.request_id:
                return found


async def _answers(consumer: AIOKafkaConsumer) -> list[StepsResharded]:
    """Those of the next poll."""
    polled = await consumer.getmany(timeout_ms=POLL_MS)
    events = (
        _decoded(record) for records in polled.values() for record in records if ANSWER_MARKER in (record.value or b"")
    )
    return [event for event in events if isinstance(event, StepsResharded)]


def _decoded(record: ConsumerRecord[bytes, bytes]) -> object:
    """None for an unreadable record, which the batcher writes to the dead letters."""
    try:
        event: object = decode(ACKS.model, record.value, tuple(record.headers))
    except PoisonRecordError:
        return None
    return event


async def _ends(consumer: AIOKafkaConsumer, settings: KafkaSettings) -> dict[str, int]:
    """Where each partition of ``batches`` ends now. An open transaction of the batcher is above the end."""
    name = BATCHES.full_name(settings.prefix)
    ends = await consumer.end_offsets([TopicPartition(name, number) for number in range(settings.batch_partitions)])
    return {str(partition.partition): end for partition, end in ends.items()}


def _assigned(consumer: AIOKafkaConsumer, settings: KafkaSettings) -> TopicPartition:
    partition = TopicPartition(ACKS.full_name(settings.prefix), 0)
    consumer.assign([partition])
    return partition
