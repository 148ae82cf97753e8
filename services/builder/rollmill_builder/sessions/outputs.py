"""The records that the builder sends, and the counters of a session's end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rollmill.codec import CONTENT_TYPE, MSGPACK, manifest_header
from rollmill.models import (
    CompletionRecord,
    Disposition,
    Manifest,
    TokenDisposition,
    TokenRange,
    Trace,
    Trajectory,
    outcome,
)
from rollmill.runtime.stream.processor import OutputRecord
from rollmill.topics import BUILT, OUTCOMES
from rollmill_builder.merging.closed_session import ClosedSession
from rollmill_builder.merging.sampled_calls import reason_code
from rollmill_builder.sessions.finalize import fit_to_limit

STAGE = "builder"

UNITS_PER_OUTCOME = 2000
"""Keeps an outcome far below its topic's limit."""


def captured_outcomes(record: CompletionRecord, units: tuple[TokenRange, ...]) -> tuple[OutputRecord, ...]:
    """Outcomes that report a record's tokens as captured; none without ``units``, which are all that it holds."""
    return tuple(_outcomes(record, Disposition.CAPTURED, units, None))


def late_outcomes(record: CompletionRecord, units: tuple[TokenRange, ...]) -> tuple[OutputRecord, ...]:
    """Of a call after its session's end: captured, and at once excluded."""
    return (*captured_outcomes(record, units), *_outcomes(record, Disposition.EXCLUDED, units, "late"))


def _outcomes(
    record: CompletionRecord, disposition: Disposition, units: tuple[TokenRange, ...], reason: str | None
) -> Iterator[OutputRecord]:
    yield from _chunks(record.session_id, record.attempt, disposition, units, reason, record.ended_at)


def _chunks(
    session_id: str,
    attempt: int,
    disposition: Disposition,
    units: tuple[TokenRange, ...],
    reason: str | None,
    at: float,
) -> Iterator[OutputRecord]:
    for start in range(0, len(units), UNITS_PER_OUTCOME):
        part: TokenDisposition = outcome(
            disposition,
            stage=STAGE,
            session_id=session_id,
            attempt=attempt,
            units=units[start : start + UNITS_PER_OUTCOME],
            reason=reason,
            at=at,
        )
        yield OutputRecord(OUTCOMES, session_id, part)


def closing_records(
    closed: ClosedSession, trajectory: Trajectory, largest: int
) -> tuple[Trajectory, bytes, tuple[OutputRecord, ...]]:
    """The trajectory as sent, its bytes, and all records of a session's end.

    Manifest header and value together stay within ``largest`` bytes, so that the broker takes the record. A value that
    may be sent as a claim check (a blob outside Kafka) leaves the whole record to the manifest.
    """
    header = manifest_header(trajectory.manifest)
    most = largest if len(header[1]) < BUILT.max_bytes // 2 else BUILT.max_bytes
    sent, value = fit_to_limit(closed, trajectory, most, len(header[1]))
    if sent is not trajectory:
        header = manifest_header(Manifest(session_id=sent.session_id, attempt=sent.attempt))
    first = OutputRecord(BUILT, sent.session_id, value, headers=((CONTENT_TYPE, MSGPACK.encode()), header))
    return sent, value, (first, *_excluded(sent))


def _excluded(trajectory: Trajectory) -> Iterator[OutputRecord]:
    for item in trajectory.excluded:
        yield from _chunks(
            trajectory.session_id,
            trajectory.attempt,
            Disposition.EXCLUDED,
            item.units,
            item.reason,
            trajectory.closed_at,
        )


def close_counts(trajectory: Trajectory) -> dict[str, int]:
    """Counters of a session's end: traces, breaks by reason, repairs, tokens trained and excluded (by reason, too)."""
    counts = Counter({"sessions_closed": 1, "traces": len(trajectory.traces)})
    counts["tokens_in_traces"] = trajectory.trained_tokens
    counts["sessions_failed"] = trajectory.error is not None
    counts["sessions_unmerged"] = trajectory.metadata.get("merge_ratio") == 1.0 and len(trajectory.traces) > 1
    for item in trajectory.excluded:
        counts["excluded_" + reason_code(item.reason)] += item.tokens
    for trace in trajectory.traces:
        counts.update(_trace_counts(trace))
    return {name: int(count) for name, count in counts.items() if count}


def _trace_counts(trace: Trace) -> dict[str, int]:
    found = {
        "drift_repaired": trace.metadata.get("drift", 0),
        "scaffolds_merged": trace.metadata.get("scaffolds", 0),
        "duplicate_end_tokens": trace.metadata.get("duplicate_end_tokens", 0),
        "traces_split": bool(trace.metadata.get("context_dropped")),
        "replies_cut": trace.metadata.get("over_long", 0),
    }
    reason = trace.metadata.get("break_reason")
    named = {"break_" + reason_code(str(reason)): 1} if reason else {}
    return {name: count for name, count in {**found, **named}.items() if isinstance(count, int)}
