"""A record in another partition than its session's is sent there, once (rule M3)."""

from __future__ import annotations

from rollmill.codec import CONTENT_TYPE, JSON, MSGPACK, header
from rollmill.errors import PoisonRecordError
from rollmill.runtime.stream.processor import InputRecord, OutputRecord, Outputs

REROUTED = "rerouted"
"""Header of a record that was rerouted: the partition and offset that it was read from."""


def rerouted(record: InputRecord, key: str, home: int, *, count: str) -> Outputs:
    """The bytes as received, with ``key`` to the partition ``home``, in the same transaction.

    Raises PoisonRecordError ``wrong_partition`` for a record that was rerouted before: then processes of the stage
    differ in their number of partitions, and would send it to each other for ever.
    """
    if any(name == REROUTED for name, _ in record.headers):
        raise PoisonRecordError(
            "wrong_partition",
            f"{key!r} belongs in partition {home} with the session id as key, was found in {record.partition} with the "
            f"key {record.key!r}, and was rerouted before; set the producer's partitioner to murmur2 (librdkafka: "
            "murmur2_random)",
        )
    headers = (*record.headers, (REROUTED, f"{record.partition}:{record.offset}".encode()))
    if header(headers, CONTENT_TYPE) is None:
        kind = JSON if (record.content or b"")[:1] == b"{" else MSGPACK
        headers = (*headers, (CONTENT_TYPE, kind.encode()))
    sent = OutputRecord(record.topic, key, record.value, headers, partition=home)
    return Outputs(records=(sent,), counts={count: 1})
