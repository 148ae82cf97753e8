"""The records by which a rank closes a step: the outcome of each of its traces, and the acknowledgement (rule L3)."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.codec import CONTENT_TYPE, encode
from rollmill.models import BatchHeader, Disposition, Record, StepAcknowledged, TokenDisposition, TraceRow, outcome
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.settings import KafkaSettings
from rollmill.topics import ACKS, OUTCOMES, Topic, partition_of
from rollmill.trainer.batches.staleness_filter import FilterResult

STAGE = "trainer"
STALE = "stale_at_hand_over"


def outcomes(header: BatchHeader, verdict: FilterResult, at: float) -> Iterator[TokenDisposition]:
    """Trained or excluded, for each trace of the header's own rank; other ranks write their own."""
    for row, kept in zip(header.table, verdict.kept, strict=True):
        if row.rank == header.rank:
            yield _outcome(row, header.batch_id, at, trained=kept)


def _outcome(row: TraceRow, batch_id: str, at: float, *, trained: bool) -> TokenDisposition:
    return outcome(
        Disposition.TRAINED if trained else Disposition.EXCLUDED,
        stage=STAGE,
        session_id=row.session_id,
        attempt=row.attempt,
        units=row.units,
        reason=None if trained else STALE,
        batch_id=batch_id,
        at=at,
    )


def acknowledgement(header: BatchHeader, at: float) -> StepAcknowledged:
    return StepAcknowledged(
        run=header.run,
        rank=header.rank,
        world_size=header.world_size,
        step=header.step,
        batch_id=header.batch_id,
        placement=header.placement,
        at=at,
    )


def closing_records(
    header: BatchHeader, verdict: FilterResult, at: float, settings: KafkaSettings
) -> list[ProducerRecord]:
    """Everything that the acknowledgement of a step writes, beside the offset."""
    closed = [outgoing(OUTCOMES, item.session_id, item, settings) for item in outcomes(header, verdict, at)]
    return [*closed, outgoing(ACKS, str(header.rank), acknowledgement(header, at), settings)]


def outgoing(topic: Topic, key: str, record: Record, settings: KafkaSettings) -> ProducerRecord:
    partition = partition_of(key.encode(), topic.partitions(settings))
    headers = ((CONTENT_TYPE, topic.format.encode()),)
    return ProducerRecord(
        topic.full_name(settings.prefix), partition, key.encode(), encode(record, topic.format), headers
    )
