"""The stages' side of large values: inputs redeemed before a stage sees them, outputs checked in before they go."""

from __future__ import annotations

from dataclasses import replace

from rollmill.errors import PoisonRecordError
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.stream.processor import InputRecord


class TaskClaimCheck(ClaimCheck):
    async def resolved(self, record: InputRecord) -> InputRecord:
        """The record with the content of its blob, or with the reason why that cannot be had.

        The reference stays its value, so that a dead letter holds the record as received. Raises
        StorageUnreachableError.
        """
        try:
            content = await self.resolve(record.value)
        except PoisonRecordError as error:
            return replace(record, resolved=error)
        return record if content is record.value else replace(record, resolved=content)
