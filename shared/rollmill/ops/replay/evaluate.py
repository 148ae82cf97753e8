"""Second step: the evaluations, as they were recorded or by other evaluators."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator

from rollmill.codec import CONTENT_TYPE, JSON
from rollmill.models import Evaluation, Trajectory
from rollmill.ops.replay.input_records import readable, records
from rollmill.ops.replay.plan import Plan
from rollmill.ops.replay.selection import SessionAttempt
from rollmill.ops.replay.stages import grader_of, settings_of
from rollmill.ops.replay.writer import Writer
from rollmill.runtime.kafka.log_reader import Log
from rollmill.runtime.kafka.transaction import ProducerRecord
from rollmill.runtime.stream.processor import InputRecord
from rollmill.topics import BUILT, EVALUATIONS, partition_of

EVALUATOR = "evaluator"
AT_ONCE = 256
"""Records of one transaction, and trajectories graded side by side."""


async def copy_evaluations(log: Log, taken: set[SessionAttempt], writer: Writer) -> None:
    """Copy the recorded evaluations of the selected sessions, timers included, in their order."""
    batch: list[ProducerRecord] = []
    async for record in records(log, EVALUATIONS):
        evaluation = readable(record)
        if evaluation is not None and (evaluation.session_id, evaluation.attempt) in taken:
            batch.append(_as_received(record, evaluation, writer))
        if len(batch) >= AT_ONCE:
            await writer.write(batch)
            batch = []
    await writer.write(batch)


def _as_received(record: InputRecord, evaluation: Evaluation, writer: Writer) -> ProducerRecord:
    key = evaluation.session_id.encode()
    partition = partition_of(key, writer.settings.partitions)
    return writer.record(EVALUATIONS, partition, key, record.content or b"", record.headers)


async def grade(log: Log, plan: Plan, writer: Writer) -> None:
    """Grade what was built with the plan's evaluators; a grade counts from the end of its session."""
    settings = settings_of(EVALUATOR, plan.into, plan.options)
    grader = grader_of(EVALUATOR, settings)
    slots = asyncio.Semaphore(grader.concurrency)

    async def one(trajectory: Trajectory, digest: str) -> list[ProducerRecord]:
        async with slots:
            grades = [await grader.grade(trajectory, digest, spec) for spec in trajectory.spec.evaluators]
        return [
            _graded(trajectory, grader.encode(_timeless(trajectory, item), EVALUATIONS.max_bytes)) for item in grades
        ]

    def _graded(trajectory: Trajectory, value: bytes) -> ProducerRecord:
        key = trajectory.session_id.encode()
        partition = partition_of(key, writer.settings.partitions)
        return writer.record(EVALUATIONS, partition, key, value, ((CONTENT_TYPE, JSON.encode()),))

    async for chunk in _chunks(log):
        made = await asyncio.gather(*(one(trajectory, digest) for trajectory, digest in chunk))
        await writer.write([record for records in made for record in records])


def _timeless(trajectory: Trajectory, evaluation: Evaluation) -> Evaluation:
    """Equal in every replay: the event time of the session's end, and no duration."""
    return evaluation.replace(at=trajectory.closed_at, duration_seconds=None)


async def _chunks(log: Log) -> AsyncIterator[list[tuple[Trajectory, str]]]:
    chunk: list[tuple[Trajectory, str]] = []
    async for record in records(log, BUILT):
        content = record.content or b""
        chunk.append((readable(record), hashlib.blake2b(content, digest_size=16).hexdigest()))
        if len(chunk) >= AT_ONCE:
            yield chunk
            chunk = []
    yield chunk
