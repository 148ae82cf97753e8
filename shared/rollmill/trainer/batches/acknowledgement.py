"""The records that finish a step on one rank: the outcome of each of its traces, and the acknowledgement (rule L3)."""

from __future__ import annotations

from collections.abc import Iterator

from rollmill.models import BatchHeader, Disposition, StepAcknowledged, TokenDisposition, TraceRow, outcome
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.settings import KafkaSettings
from rollmill.topics import ACKS, OUTCOMES
from rollmill.trainer.batches.staleness_filter import FilterResult
from rollmill.trainer.producer_records import STAGE, to_producer_record

STALE = "stale_at_hand_over"


def outcomes(header: BatchHeader, result: FilterResult, at: float) -> Iterator[TokenDisposition]:
    """Trained or excluded, for each trace of the header's own rank; other ranks write theirs."""
    for row, kept in zip(header.table, result.kept, strict=True):
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
    header: BatchHeader, result: FilterResult, at: float, settings: KafkaSettings
) -> list[ProducerRecord]:
    """Everything that is written when a step is acknowledged, except the offset."""
    finished = [to_producer_record(OUTCOMES, item.session_id, item, settings) for item in outcomes(header, result, at)]
    return [*finished, to_producer_record(ACKS, str(header.rank), acknowledgement(header, at), settings)]
