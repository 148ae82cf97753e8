"""Effects turned into records that are ready to send, sizes checked before anything is applied (rule T6)."""

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


def producer_record(emit: OutputRecord, settings: KafkaSettings) -> ProducerRecord:
    """Encode and place one emitted record. Raises PoisonRecordError ``output_too_large``."""
    key = emit.key.encode()
    value = encode_value(emit.topic, emit.value)
    most = largest_value(emit.topic, settings)
    if value is not None and len(value) > most:
        raise PoisonRecordError(
            "output_too_large", f"{len(value)} bytes for {emit.topic.name}, at most {most} are allowed"
        )
    headers = emit.headers
    if emit.topic.format in WIRE_FORMATS and isinstance(emit.value, Record):
        headers = (*headers, (CONTENT_TYPE, emit.topic.format.encode()))
    partition = emit.partition
    if partition is None:
        partition = partition_of(key, emit.topic.partitions(settings))
    return ProducerRecord(emit.topic.full_name(settings.prefix), partition, key, value, headers)


def encode_value(topic: Topic, value: Record | bytes | None) -> bytes | None:
    """Bytes of a value in the topic's format; bytes pass as they are."""
    if value is None or isinstance(value, bytes):
        return value
    return encode(value, topic.format)


def changelog_producer_record(change: ChangelogRecord, topic: str, partition: int) -> ProducerRecord:
    headers: Headers = () if change.manifest is None else (manifest_header(change.manifest),)
    return ProducerRecord(topic, partition, change.key.encode(), change.payload, headers)
