"""Store large values before their records are sent, resolve references after records are read: the claim check."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from rollmill.codec import MAX_BYTES, Headers, decode
from rollmill.errors import FatalError, PoisonRecordError
from rollmill.runtime.claim_check.blob_store import BlobStore
from rollmill.runtime.claim_check.reference import BlobReference, is_reference
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.settings import KafkaSettings
from rollmill.topics import CLAIM_CHECKED, Topic

K = TypeVar("K")

AT_ONCE = 4
"""Blobs written side by side."""


class ClaimCheck:
    """Of one prefix. ``store`` None: every value stays in its record, and a reference cannot be read."""

    def __init__(self, settings: KafkaSettings, store: BlobStore | None) -> None:
        self._store, self._settings = store, settings
        self._formats = {topic.full_name(settings.prefix): topic.format for topic in CLAIM_CHECKED}

    @classmethod
    def of(cls, settings: KafkaSettings) -> Self:
        """Raises ConfigurationError where a storage is configured that cannot be used."""
        url = settings.claim_check_url
        return cls(settings, BlobStore(url, settings.prefix) if url else None)

    def largest(self, topic: Topic) -> int:
        """Most bytes of a value for ``topic`` (rule C1)."""
        return largest_value(topic, self._settings)

    async def store(self, topic: Topic, value: bytes) -> bytes:
        """The value, or above the threshold a reference to it; its blob is durable then.

        Raises StorageUnreachableError.
        """
        if self._store is None or topic not in CLAIM_CHECKED or len(value) <= self._settings.claim_check_bytes:
            return value
        return await self._put(self._store, value, topic.format)

    async def store_all(self, records: Sequence[ProducerRecord]) -> list[ProducerRecord]:
        """The same for records that are ready to be sent. Raises StorageUnreachableError."""
        places = asyncio.Semaphore(AT_ONCE)
        return list(await asyncio.gather(*(self._checked(record, places) for record in records)))

    async def resolve(self, value: bytes | None) -> bytes | None:
        """The value that a reference points to; anything else is returned as it is.

        Raises PoisonRecordError ``missing_blob``, ``corrupt_blob``, ``no_blob_store``, ``too_large`` or ``malformed``,
        and StorageUnreachableError, after which it is unknown whether the blob exists.
        """
        if value is None or not is_reference(value):
            return value
        reference = BlobReference.decode(value)
        if self._store is None:
            raise PoisonRecordError(
                "no_blob_store", "the value is in object storage: set ROLLMILL_CLAIM_CHECK_URL as its writer has it"
            )
        if reference.size > MAX_BYTES:
            raise PoisonRecordError("too_large", f"{reference.size} bytes, at most {MAX_BYTES} are read")
        return await self._get(self._store, reference)

    async def read(self, topic: Topic, value: bytes | None, headers: Headers) -> Any:
        """The decoded value of a record of ``topic``, or of its blob. Raises as `decode` and `resolve` do."""
        return decode(topic.model, await self.resolve(value), headers)

    async def resolve_all(self, values: Mapping[K, bytes]) -> dict[K, bytes]:
        """The same for a task's state. A task cannot continue without its state: raises FatalError."""
        try:
            return {key: await self.resolve(value) or value for key, value in values.items()}
        except PoisonRecordError as error:
            raise FatalError(f"a part of the state cannot be read from the object storage: {error}") from error

    async def _checked(self, record: ProducerRecord, places: asyncio.Semaphore) -> ProducerRecord:
        content_type, value = self._formats.get(record.topic), record.value
        if (
            self._store is None
            or content_type is None
            or value is None
            or len(value) <= self._settings.claim_check_bytes
        ):
            return record
        async with places:
            return replace(record, value=await self._put(self._store, value, content_type))

    async def _put(self, store: BlobStore, value: bytes, content_type: str) -> bytes:
        reference = await asyncio.to_thread(BlobReference.to, value, content_type)
        await store.put(reference.sha256, value)
        return reference.encode()

    async def _get(self, store: BlobStore, reference: BlobReference) -> bytes:
        content = await store.get(reference.sha256, reference.size)
        if content is None:
            content = await store.get(reference.sha256, reference.size, "trash")
        if content is None:
            raise PoisonRecordError("missing_blob", f"{reference.sha256} is not in the object storage")
        if not await asyncio.to_thread(reference.matches, content):
            raise PoisonRecordError(
                "corrupt_blob", f"{reference.sha256} holds other bytes than were written ({reference.size} expected)"
            )
        return content


def largest_value(topic: Topic, settings: KafkaSettings) -> int:
    """Most bytes of a value for ``topic`` (rule C1): of the record, or of the blob where there is a storage."""
    return MAX_BYTES if settings.claim_check_url and topic in CLAIM_CHECKED else topic.max_bytes
