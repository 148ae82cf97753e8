"""The trajectory in a record, wherever its bytes are stored."""

from __future__ import annotations

import stamina

from rollmill.codec import decode
from rollmill.models import Trajectory
from rollmill.runtime.claim_check import ClaimCheck, StorageUnreachableError
from rollmill_evaluator.consumer.in_flight import ReceivedRecord


async def read_trajectory(received: ReceivedRecord, claim_check: ClaimCheck | None) -> tuple[Trajectory, bytes]:
    """The trajectory and its encoded bytes, which may be stored outside of the record. Raises PoisonRecordError."""
    content = await _content(received.value, claim_check)
    trajectory: Trajectory = decode(Trajectory, content, received.headers)
    return trajectory, content or b""


async def _content(value: bytes | None, claim_check: ClaimCheck | None) -> bytes | None:
    """Retries without end while the storage is unreachable: the record waits, and so do those behind it."""
    if claim_check is None:
        return value
    async for attempt in stamina.retry_context(on=StorageUnreachableError, attempts=None, timeout=None):
        with attempt:
            return await claim_check.resolve(value)
    return None
