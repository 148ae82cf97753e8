"""Large values outside the log: what is stored, what a record carries, and what becomes of a blob that is gone."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmill.cli.commands.maintenance import collect
from rollmill.codec import MAX_BYTES, MSGPACK, REFERENCE, decode
from rollmill.errors import ConfigurationError, FatalError, InvalidInputError, PoisonRecordError
from rollmill.models import EvalResult
from rollmill.runtime.claim_check import (
    BlobReference,
    BlobStore,
    ClaimCheck,
    StorageUnreachableError,
    is_reference,
    largest_value,
)
from rollmill.runtime.claim_check.garbage_collection import CollectedGarbage, collect_garbage
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.settings import KafkaSettings
from rollmill.topics import BATCHES, BUILT, COMPLETIONS, OUTCOMES

HOUR = 3600.0
LIMIT = 2**16
LARGE = b"x" * 100_000


@pytest.fixture
def settings(tmp_path: Path) -> KafkaSettings:
    return KafkaSettings(claim_check_url=f"file://{tmp_path}/store", claim_check_bytes=LIMIT, prefix="t.")


@pytest.fixture
def store(settings: KafkaSettings) -> BlobStore:
    return BlobStore(settings.claim_check_url, settings.prefix)


def files(tmp_path: Path, shelf: str = "blobs") -> list[Path]:
    return sorted(path for path in (tmp_path / "store").glob(f"t.{shelf}/*/*") if path.is_file())


async def test_a_large_value_becomes_the_same_small_reference_each_time(
    settings: KafkaSettings, tmp_path: Path
) -> None:
    claims = ClaimCheck.of(settings)
    first, second = [await claims.store(BUILT, LARGE) for _ in range(2)]
    assert first == second
    assert is_reference(first)
    assert len(first) < 300
    assert len(files(tmp_path)) == 1
    assert await claims.resolve(first) == LARGE
    assert BlobReference.decode(first) == BlobReference.to(LARGE, MSGPACK)


@pytest.mark.parametrize("value", [b"x" * LIMIT, b"", b"{}"])
async def test_a_small_value_stays(settings: KafkaSettings, value: bytes) -> None:
    claims = ClaimCheck.of(settings)
    assert await claims.store(COMPLETIONS, value) is value
    assert await claims.resolve(value) is value
    assert await claims.resolve(None) is None


async def test_only_topics_of_large_values_are_checked_in(settings: KafkaSettings) -> None:
    claims = ClaimCheck.of(settings)
    records = [
        ProducerRecord(topic.full_name("t."), 0, b"k", LARGE, (("h", b"1"),)) for topic in (BUILT, OUTCOMES, BATCHES)
    ]
    built, *others = await claims.store_all([*records, ProducerRecord("t.built", 0, b"k", None)])
    assert is_reference(built.value)
    assert (built.key, built.headers, built.partition) == (b"k", (("h", b"1"),), 0)
    assert [record.value for record in others] == [LARGE, LARGE, None]


def test_limits_grow_with_a_storage_and_stay_without(settings: KafkaSettings) -> None:
    assert largest_value(BUILT, settings) == MAX_BYTES
    assert largest_value(OUTCOMES, settings) == OUTCOMES.max_bytes
    assert largest_value(BUILT, KafkaSettings()) == BUILT.max_bytes


def _gone(path: Path) -> None:
    path.unlink()


def _flipped(path: Path) -> None:
    path.write_bytes(b"y" + path.read_bytes()[1:])


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _swollen(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(2**30)  # sparse: takes no room on the disk, and must take none in memory


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(_gone, "missing_blob"), (_flipped, "corrupt_blob"), (_cut, "corrupt_blob"), (_swollen, "corrupt_blob")],
)
async def test_a_harmed_blob_has_a_named_reason(
    settings: KafkaSettings, tmp_path: Path, harm: object, reason: str
) -> None:
    claims = ClaimCheck.of(settings)
    reference = await claims.store(BUILT, LARGE)
    (path,) = files(tmp_path)
    assert callable(harm)
    harm(path)
    with pytest.raises(PoisonRecordError) as refused:
        await claims.resolve(reference)
    assert refused.value.reason == reason
    with pytest.raises(FatalError, match=reason):
        await claims.resolve_all({"state": reference})


def _reference(**changes: object) -> bytes:
    fields = {"sha256": "0" * 64, "size": 1, "content_type": "text/plain", **changes}
    return REFERENCE + json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (_reference(sha256="../../etc/passwd"), "malformed"),
        (_reference(sha256="A" * 64), "malformed"),
        (_reference(sha256="0" * 64 + "\n"), "malformed"),
        (_reference(size=0), "malformed"),
        (_reference(size="1"), "malformed"),
        (_reference(size=2**80), "malformed"),
        (_reference(size=MAX_BYTES + 1), "too_large"),
        (REFERENCE, "malformed"),
        (REFERENCE + b"[" * 400, "malformed"),
        (REFERENCE + b" " * 10_000_000, "malformed"),
        (REFERENCE + b"\xff\xfe", "malformed"),
    ],
)
async def test_a_crafted_reference_is_refused(settings: KafkaSettings, value: bytes, reason: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(PoisonRecordError) as refused:
            await ClaimCheck.of(settings).resolve(value)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.reason == reason
    assert peak < 2**20


async def test_without_a_storage_values_stay_and_references_say_what_is_missing() -> None:
    claims = ClaimCheck.of(KafkaSettings())
    assert await claims.store(BUILT, LARGE) is LARGE
    with pytest.raises(PoisonRecordError, match="ROLLMILL_CLAIM_CHECK_URL") as refused:
        await claims.resolve(_reference())
    assert refused.value.reason == "no_blob_store"


def test_a_reader_that_redeems_nothing_says_so() -> None:
    with pytest.raises(PoisonRecordError) as refused:
        decode(EvalResult, _reference())
    assert refused.value.reason == "unredeemed"


async def test_a_storage_that_is_away_is_no_poison(settings: KafkaSettings, tmp_path: Path) -> None:
    claims = ClaimCheck.of(settings)
    reference = await claims.store(BUILT, LARGE)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(StorageUnreachableError):
        await claims.resolve(reference)
    (tmp_path / "store").write_text("a file in the directory's place")
    with pytest.raises(StorageUnreachableError):
        await claims.resolve(reference)
    with pytest.raises(StorageUnreachableError):
        await claims.store(BUILT, LARGE)
    assert issubclass(StorageUnreachableError, OSError), "a task takes it for a lost broker: it starts again"


@pytest.mark.parametrize("url", ["ftp://host/x", "no url", "s3://"])
def test_a_storage_that_cannot_be_is_a_mistake_in_the_settings(url: str) -> None:
    with pytest.raises(ConfigurationError, match="ROLLMILL_CLAIM_CHECK_URL"):
        BlobStore(url, "t.")


# ---- garbage collection ----------------------------------------------------------------------------------------------


class Log:
    """Retained records, as digests; ``meanwhile`` happens while they are read."""

    def __init__(self, *digests: str) -> None:
        self.digests = list(digests)

    async def read(self) -> AsyncIterator[str]:
        for digest in self.digests:
            yield digest


async def swept(store: BlobStore, log: Log, now: float, *, dry_run: bool = False) -> CollectedGarbage:
    return await collect_garbage(store, log.read, now=now, safety_seconds=HOUR, dry_run=dry_run)


async def stored(claims: ClaimCheck, value: bytes) -> tuple[bytes, str]:
    reference = await claims.store(BUILT, value)
    return reference, BlobReference.decode(reference).sha256


def aged(path: Path, at: float) -> None:
    os.utime(path, (at, at))


async def test_what_no_record_refers_to_goes_in_two_steps(
    settings: KafkaSettings, store: BlobStore, tmp_path: Path
) -> None:
    claims = ClaimCheck.of(settings)
    kept, _ = await stored(claims, LARGE)
    orphan, _ = await stored(claims, LARGE + b"orphan")
    now = files(tmp_path)[0].stat().st_mtime
    log = Log(BlobReference.decode(kept).sha256)
    assert (await swept(store, log, now + 60)).young == 1, "it may belong to a record under way"
    tried = await swept(store, log, now + 2 * HOUR, dry_run=True)
    assert (tried.to_trash, tried.referenced, len(files(tmp_path))) == (1, 1, 2)
    assert (await swept(store, log, now + 2 * HOUR)).to_trash == 1
    assert await claims.resolve(orphan) == LARGE + b"orphan", "still found"
    again = await swept(store, log, now + 2 * HOUR)
    assert (again.deleted, again.bytes_deleted) == (1, len(LARGE) + 6)
    assert await claims.resolve(kept) == LARGE
    with pytest.raises(PoisonRecordError, match="missing_blob"):
        await claims.resolve(orphan)


async def test_a_writer_that_stores_the_same_again_during_a_sweep_loses_nothing(
    settings: KafkaSettings, store: BlobStore, tmp_path: Path
) -> None:
    claims = ClaimCheck.of(settings)
    reference, digest = await stored(claims, LARGE)
    (path,) = files(tmp_path)
    now = path.stat().st_mtime
    aged(path, now - 2 * HOUR)
    log = Log()

    async def read() -> AsyncIterator[str]:
        """The records are read to their end; then the writer stores its blob, and sends the record."""
        for item in log.digests:
            yield item
        await stored(claims, LARGE)
        log.digests.append(digest)

    assert (await collect_garbage(store, read, now=now, safety_seconds=HOUR, dry_run=False)).to_trash == 1
    assert not files(tmp_path)
    assert await claims.resolve(reference) == LARGE
    assert (await swept(store, log, now + 3 * HOUR)).restored == 1
    await swept(store, log, now + 6 * HOUR)
    assert await claims.resolve(reference) == LARGE
    assert (len(files(tmp_path)), len(files(tmp_path, "trash"))) == (1, 0)


def test_the_command_asks_for_a_storage_and_a_safety_age(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ROLLMILL_CLAIM_CHECK_URL"):
        collect()
    monkeypatch.setenv("ROLLMILL_CLAIM_CHECK_URL", f"file://{tmp_path}")
    with pytest.raises(InvalidInputError, match="at least 1 hour"):
        collect(older_than=0.5)


async def test_prefixes_share_a_storage_and_not_their_blobs(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store"
    mine, theirs = [KafkaSettings(claim_check_url=url, claim_check_bytes=LIMIT, prefix=name) for name in ("t.", "t.t.")]
    reference, _ = await stored(ClaimCheck.of(theirs), LARGE)
    found = await swept(BlobStore(url, mine.prefix), Log(), 4e9)
    assert found == CollectedGarbage()
    assert await ClaimCheck.of(theirs).resolve(reference) == LARGE
