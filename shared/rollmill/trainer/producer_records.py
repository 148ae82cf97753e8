"""Records as the trainer writes them: keyed, encoded in the topic's format, in the key's partition."""

from __future__ import annotations

from rollmill.codec import CONTENT_TYPE, encode
from rollmill.models import Record
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.settings import KafkaSettings
from rollmill.topics import Topic, partition_of

STAGE = "trainer"
"""The stage in outcomes that the trainer writes."""


def to_producer_record(topic: Topic, key: str, record: Record, settings: KafkaSettings) -> ProducerRecord:
    partition = partition_of(key.encode(), topic.partitions(settings))
    headers = ((CONTENT_TYPE, topic.format.encode()),)
    return ProducerRecord(
        topic.full_name(settings.prefix), partition, key.encode(), encode(record, topic.format), headers
    )
