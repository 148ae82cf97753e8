"""Outputs turned into producer records that are ready to send, sizes checked before anything is applied (rule T6)."""

from __future__ import annotations

from rollmill.codec import CONTENT_TYPE, JSON, MSGPACK, SAFETENSORS, Headers, encode, manifest_header
from rollmill.errors import PoisonRecordError
from rollmill.models import Record
from rollmill.runtime.claim_check import largest_value
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.runtime.stream.processor import OutputRecord
from rollmill.runtime.stream.state import ChangelogRecord
from rollmill.settings import KafkaSettings
from rollmill.topics import Topic, partition_of

WIRE_FORMATS = (JSON, MSGPACK, SAFETENSORS)


def producer_record(record: OutputRecord, settings: KafkaSettings) -> ProducerRecord:
    """Encode and assign one output record to a partition. Raises PoisonRecordError ``output_too_large``."""
    key = record.key.encode()
    value = encode_value(record.topic, record.value)
    most = largest_value(record.topic, settings)
    if value is not None and len(value) > most:
        raise PoisonRecordError(
            "output_too_large", f"{len(value)} bytes for {record.topic.name}, at most {most} are allowed"
        )
    headers = record.headers
    if record.topic.format in WIRE_FORMATS and isinstance(record.value, Record):
        headers = (*headers, (CONTENT_TYPE, record.topic.format.encode()))
    partition = record.partition
    if partition is None:
        partition = partition_of(key, record.topic.partitions(settings))
    return ProducerRecord(record.topic.full_name(settings.prefix), partition, key, value, headers)


def encode_value(topic: Topic, value: Record | bytes | None) -> bytes | None:
    """Bytes of a value in the topic's format; bytes pass as they are."""
    if value is None or isinstance(value, bytes):
        return value
    return encode(value, topic.format)


def changelog_producer_record(record: ChangelogRecord, topic: str, partition: int) -> ProducerRecord:
    headers: Headers = () if record.manifest is None else (manifest_header(record.manifest),)
    return ProducerRecord(topic, partition, record.key.encode(), record.payload, headers)
