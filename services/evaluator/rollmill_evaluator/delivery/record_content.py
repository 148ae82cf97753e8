"""The bytes of a record, wherever they are kept."""

from __future__ import annotations

import stamina

from rollmill.runtime.claim_check import ClaimCheck, StorageUnreachableError


async def content_of(value: bytes | None, claims: ClaimCheck | None) -> bytes | None:
    """A storage that is away is asked until it answers: the record waits. Raises PoisonRecordError."""
    if claims is None:
        return value
    async for attempt in stamina.retry_context(on=StorageUnreachableError, attempts=None, timeout=None):
        with attempt:
            return await claims.resolve(value)
    return None
