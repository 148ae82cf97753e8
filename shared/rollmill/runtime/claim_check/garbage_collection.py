"""Garbage collection of blobs that no retained record refers to.

Nothing is deleted at once. A blob that is older than the safety age and unreferenced moves to the trash, where readers
still find it; what has been in the trash for as long again, and is still unreferenced, is deleted, and what a record
refers to by then comes back. So a writer that stores the same content again during a collection loses nothing,
provided that its record is committed within the safety age.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition

from rollmill.codec import MAX_BYTES
from rollmill.errors import PoisonRecordError
from rollmill.runtime.claim_check.blob_store import Blob, BlobStore, Shelf
from rollmill.runtime.claim_check.reference import BlobReference, is_reference
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.settings import KafkaSettings
from rollmill.topics import CLAIM_CHECKED, DEAD_LETTERS

POLL_MS = 200


@dataclass
class CollectedGarbage:
    """What a collection found and did, in blobs; ``bytes_deleted`` in bytes."""

    blobs: int = 0
    referenced: int = 0
    young: int = 0
    to_trash: int = 0
    restored: int = 0
    deleted: int = 0
    bytes_deleted: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


async def collect_garbage(
    store: BlobStore,
    read_references: Callable[[], AsyncIterator[str]],
    *,
    now: float,
    safety_seconds: float,
    dry_run: bool,
) -> CollectedGarbage:
    """Collect the blobs of a prefix; ``read_references`` yields the digests that its retained records refer to.

    ``dry_run``: count only. The blobs are listed before the records are read: what is written later is not looked at.
    """
    blobs = [blob async for blob in store.listed()]
    trash = [blob async for blob in store.listed("trash")]
    referenced = {digest async for digest in read_references()}
    collector = _Collector(store, referenced, now - safety_seconds, dry_run=dry_run)
    for blob in blobs:
        await collector.look(blob)
    for blob in trash:
        await collector.look_again(blob, {item.digest for item in blobs})
    return collector.found


class _Collector:
    def __init__(self, store: BlobStore, referenced: set[str], before: float, *, dry_run: bool) -> None:
        self._store, self._referenced, self._before, self._dry = store, referenced, before, dry_run
        self.found = CollectedGarbage()

    async def look(self, blob: Blob) -> None:
        self.found.blobs += 1
        if blob.digest in self._referenced:
            self.found.referenced += 1
        elif blob.written_at >= self._before:
            self.found.young += 1
        else:
            self.found.to_trash += 1
            if not self._dry:
                await self._move(blob, "blobs", "trash")

    async def look_again(self, blob: Blob, present: set[str]) -> None:
        if blob.digest in self._referenced and blob.digest not in present:
            self.found.restored += 1
            if not self._dry:
                await self._move(blob, "trash", "blobs")
        elif blob.written_at < self._before:
            self.found.deleted += 1
            self.found.bytes_deleted += blob.size
            if not self._dry:
                await self._store.delete(blob.digest, "trash")

    async def _move(self, blob: Blob, source: Shelf, target: Shelf) -> None:
        """Written before it is deleted: at every moment it is in one of the two places."""
        content = await self._store.get(blob.digest, MAX_BYTES, source)
        if content is not None:
            await self._store.put(blob.digest, content, target)
            await self._store.delete(blob.digest, source)


async def references(settings: KafkaSettings) -> AsyncIterator[str]:
    """Digests that retained records of the prefix refer to, dead letters and superseded changelog records included."""
    async with KafkaClients(settings).reading(reset="earliest") as consumer:
        for topic in (*CLAIM_CHECKED, DEAD_LETTERS):
            name = topic.full_name(settings.prefix)
            places = [TopicPartition(name, number) for number in range(topic.partitions(settings))]
            async for value in _values(consumer, places):
                if is_reference(value):
                    try:
                        yield BlobReference.decode(value).sha256
                    except PoisonRecordError:
                        continue


async def _values(consumer: AIOKafkaConsumer, places: list[TopicPartition]) -> AsyncIterator[bytes]:
    consumer.assign(places)
    await consumer.seek_to_beginning(*places)
    for place, end in (await consumer.end_offsets(places)).items():
        while await consumer.position(place) < end:
            for records in (await consumer.getmany(place, timeout_ms=POLL_MS)).values():
                for record in records:
                    yield record.value or b""
