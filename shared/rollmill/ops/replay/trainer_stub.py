"""A stub of the trainer: it finishes steps at the pace of the live run, and computes nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rollmill.codec import CONTENT_TYPE, JSON, Headers, encode
from rollmill.models import BatchHeader, Disposition, StepAcknowledged, TokenRange, outcome
from rollmill.ops.ledger.batch_header import batch_header
from rollmill.ops.replay.writer import TaskDriver, Writer
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.runtime.stream.processor import InputRecord, OutputRecord
from rollmill.runtime.stream.producer_records import producer_record
from rollmill.topics import ACKS, BATCHES, OUTCOMES

STAGE = "replay"
JSON_HEADERS: Headers = ((CONTENT_TYPE, JSON.encode()),)


@dataclass
class TrainerStub:
    """Holds the steps that were cut; ``remaining``: how many more steps the live run's trainer finished."""

    batcher: TaskDriver
    writer: Writer
    remaining: int
    open_steps: deque[BatchHeader] = field(default_factory=deque)

    def receive(self, sent: list[tuple[ProducerRecord, int]]) -> None:
        name = BATCHES.full_name(self.writer.settings.prefix)
        headers = (batch_header(item.value or b"") for item, _ in sent if item.topic == name)
        self.open_steps.extend(header for header in headers if header.rank == 0 and header.micro_batch == 0)

    async def finish_next(self, at: float) -> None:
        """The live run finished a step: so does this one, where a step was cut."""
        self.remaining -= 1
        if self.open_steps:
            await self._finish(self.open_steps.popleft(), at)

    async def finish_rest(self, at: float) -> bool:
        """Finish all steps, where the live run finished no more. Returns whether there was one."""
        finished = False
        while self.open_steps and not self.remaining:
            await self._finish(self.open_steps.popleft(), at)
            finished = True
        return finished

    async def _finish(self, header: BatchHeader, at: float) -> None:
        acks = [_acknowledged(header, rank, at) for rank in range(header.world_size)]
        records = [self.writer.record(ACKS, 0, str(ack.rank).encode(), encode(ack, JSON), JSON_HEADERS) for ack in acks]
        offsets = await self.writer.write([*records, *self._trained(header, at)])
        for sent, offset in zip(records, offsets, strict=False):
            await self.batcher.feed(InputRecord(ACKS, 0, offset, sent.key, sent.value, sent.headers))

    def _trained(self, header: BatchHeader, at: float) -> list[ProducerRecord]:
        units: dict[tuple[str, int], tuple[TokenRange, ...]] = {}
        for row in header.table:
            units[row.session_id, row.attempt] = (*units.get((row.session_id, row.attempt), ()), *row.units)
        outcomes = (
            outcome(
                Disposition.TRAINED,
                stage=STAGE,
                session_id=session_id,
                attempt=attempt,
                units=own,
                batch_id=header.batch_id,
                at=at,
            )
            for (session_id, attempt), own in units.items()
        )
        return [
            producer_record(OutputRecord(OUTCOMES, item.session_id, item), self.writer.settings) for item in outcomes
        ]


def _acknowledged(header: BatchHeader, rank: int, at: float) -> StepAcknowledged:
    return StepAcknowledged(
        run=header.run, rank=rank, world_size=header.world_size, step=header.step, batch_id=header.batch_id, at=at
    )
