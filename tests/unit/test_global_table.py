"""A table's reader passes over every record that it cannot read or apply, and goes on with the next."""

from __future__ import annotations

from typing import Any

from aiokafka import ConsumerRecord

from rollmill.codec import Headers, encode
from rollmill.errors import PoisonRecordError
from rollmill.models import PolicyAnnouncement, PolicyVersion
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.global_table import GlobalTable
from rollmill.settings import KafkaSettings
from rollmill.topics import POLICIES

GOOD = encode(PolicyAnnouncement(version=PolicyVersion(0, 7), at=1.0))


def record(value: bytes | None, key: bytes | None = b"policy", headers: Headers = ()) -> ConsumerRecord[bytes, bytes]:
    return ConsumerRecord("policies", 0, 0, 0, 0, key, value, None, 0, 0, headers)


def test_f9_what_cannot_be_read_or_applied_is_passed_over() -> None:
    seen: list[int] = []
    refused: list[str] = []

    def apply(_key: str, value: PolicyAnnouncement | None) -> None:
        if value is None:
            raise KeyError("a tombstone is not expected")
        seen.append(value.version.version)

    def forget(_key: str, headers: Headers) -> None:
        raise ValueError(headers)

    def refuse(_key: str, error: PoisonRecordError) -> None:
        refused.append(error.reason)

    settings = KafkaSettings()
    arguments: tuple[Any, ...] = (KafkaClients(settings), settings, POLICIES, apply, refuse)
    for table in (GlobalTable(*arguments), GlobalTable(*arguments, forget=forget)):
        for value in (b"\x81\x90\x01", b"", b"{", b"\xc1", None, GOOD):
            table._take(record(value, headers=(("content-type", None), ("x", None))))
        table._take(record(GOOD, key=None))
    assert seen == [7] * 4
    assert refused == [*["malformed"] * 4, "invalid"] * 2
