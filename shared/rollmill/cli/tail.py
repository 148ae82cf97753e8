"""Records of a topic as lines of JSON: decoded by the registry's model, arrays abbreviate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition

from rollmill.codec import DEAD_LETTER, DEAD_LETTER_DECISION, SAFETENSORS, decode, header
from rollmill.errors import PoisonRecordError
from rollmill.models import DeadLetterInfo
from rollmill.models.dead_letter import DeadLetterDecision
from rollmill.ops.ledger.batch_header import batch_header
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.settings import KafkaSettings
from rollmill.topics import CLAIM_CHECKED, DEAD_LETTERS, Topic

SHOWN = 6
"""Numbers shown of a longer array."""
POLL_MS = 500


async def follow(
    settings: KafkaSettings,
    topic: Topic,
    *,
    from_beginning: bool,
    limit: int | None,
    full: bool,
    key: str | None = None,
) -> AsyncIterator[str]:
    """Lines for the records of ``topic``: from the oldest, or from now on; ``limit`` None: no end.

    ``key``: only records with this key; None: all.
    """
    wanted = None if key is None else key.encode()
    shown, claims = 0, ClaimCheck.of(settings)
    async with KafkaClients(settings).reading(reset="earliest") as consumer:
        await _assign(consumer, settings, topic, from_beginning=from_beginning)
        while limit is None or shown < limit:
            for records in (await consumer.getmany(timeout_ms=POLL_MS)).values():
                for record in (each for each in records if wanted in (None, each.key)):
                    if limit is not None and shown >= limit:
                        break
                    shown += 1
                    yield await _line(claims, topic, record, full=full)


async def _assign(consumer: AIOKafkaConsumer, settings: KafkaSettings, topic: Topic, *, from_beginning: bool) -> None:
    name = topic.full_name(settings.prefix)
    partitions = [TopicPartition(name, number) for number in range(topic.partitions(settings))]
    consumer.assign(partitions)
    await (consumer.seek_to_beginning if from_beginning else consumer.seek_to_end)(*partitions)


async def _line(claims: ClaimCheck, topic: Topic, record: ConsumerRecord[bytes, bytes], *, full: bool) -> str:
    if topic not in CLAIM_CHECKED or topic.model is None:
        return line(topic, record, full=full)
    try:
        record = replace(record, value=await claims.resolve(record.value))
    except PoisonRecordError as error:
        return line(topic, record, problem=str(error))
    return line(topic, record, full=full)


def line(topic: Topic, record: ConsumerRecord[bytes, bytes], *, full: bool = False, problem: str | None = None) -> str:
    """One record as one line of JSON. A record that cannot be decoded is shown with the reason, never skipped.

    ``problem``: why its large value cannot be read.
    """
    value = describe(topic, record) if problem is None else {"undecodable": problem}
    content = {
        "partition": record.partition,
        "offset": record.offset,
        "key": None if record.key is None else record.key.decode("utf-8", "replace"),
        **(value if full else abbreviate(value)),
    }
    return orjson.dumps(content).decode()


def describe(topic: Topic, record: ConsumerRecord[bytes, bytes]) -> dict[str, Any]:
    """The value of a record as plain data: decoded, or its size where the topic has no model."""
    headers = tuple(record.headers)
    try:
        decision = header(headers, DEAD_LETTER_DECISION)
        if topic is DEAD_LETTERS and decision is not None:
            return {"decision": decode(DeadLetterDecision, decision).model_dump(mode="json")}
        if topic is DEAD_LETTERS:
            info: DeadLetterInfo = decode(DeadLetterInfo, header(headers, DEAD_LETTER))
            return {"dead_letter": info.model_dump(mode="json"), "bytes": len(record.value or b"")}
        if record.value is None or topic.model is None:
            return {"bytes": None if record.value is None else len(record.value)}
        if topic.format == SAFETENSORS:
            return {"header": batch_header(record.value).model_dump(mode="json"), "bytes": len(record.value)}
        return {"value": decode(topic.model, record.value, headers).model_dump(mode="json")}
    except PoisonRecordError as error:
        return {"undecodable": str(error), "bytes": len(record.value or b"")}


def abbreviate(value: Any) -> Any:
    """The same data with long arrays of numbers written as text: the first few, and how many there are."""
    if isinstance(value, dict):
        return {key: abbreviate(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > SHOWN and all(isinstance(item, (int, float)) for item in value):
        return f"[{', '.join(f'{item:.6g}' for item in value[:SHOWN])}, … {len(value)} in all]"
    return [abbreviate(item) for item in value]
