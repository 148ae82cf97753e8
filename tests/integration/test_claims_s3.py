"""Large values in a bucket: the same promises as in a directory, against an S3 server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from moto.server import ThreadedMotoServer

from rollmill.errors import PoisonRecordError
from rollmill.runtime.claim_check import BlobReference, BlobStore, ClaimCheck, StorageUnreachableError
from rollmill.runtime.claim_check.garbage_collection import collect_garbage
from rollmill.settings import KafkaSettings
from rollmill.topics import BUILT

LARGE = bytes(range(256)) * 40_000


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    httpx.put(f"http://{host}:{port}/large").raise_for_status()
    yield server
    server.stop()


async def test_a_bucket_keeps_returns_and_forgets(server: ThreadedMotoServer) -> None:
    settings = KafkaSettings(claim_check_url="s3://large/values", prefix="t.")
    claims, store = ClaimCheck.of(settings), BlobStore(settings.claim_check_url, "t.")
    reference = await claims.store(BUILT, LARGE)
    assert await claims.resolve(reference) == LARGE
    digest = BlobReference.decode(reference).sha256
    assert [(blob.digest, blob.size) async for blob in store.listed()] == [(digest, len(LARGE))]

    async def none() -> AsyncIterator[str]:
        for digest in tuple[str, ...]():
            yield digest

    for step in ("to_trash", "deleted"):
        swept = await collect_garbage(store, none, now=4e9, safety_seconds=60, dry_run=False)
        assert getattr(swept, step) == 1
    with pytest.raises(PoisonRecordError, match="missing_blob"):
        await claims.resolve(reference)
    await store.put(digest, LARGE[:-1])
    with pytest.raises(PoisonRecordError, match="corrupt_blob"):
        await claims.resolve(reference)
    server.stop()
    with pytest.raises(StorageUnreachableError):
        await claims.resolve(reference)
