"""One record of ``built`` answered: every evaluator of its spec has run and its word is on ``evaluations``."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog

from rollmill.codec import decode
from rollmill.errors import InvalidInputError, PoisonRecordError
from rollmill.models import Evaluation, EvaluatorSpec, Trajectory
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.failpoints import Failpoint, Failpoints
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies import BaseTrajectoryEvaluator, ResourceClass, StrategyRegistry
from rollmill.topics import EVALUATIONS, partition_of
from rollmill_evaluator.consumer.concurrent_consumer import Received
from rollmill_evaluator.delivery.record_content import content_of
from rollmill_evaluator.grading import Grader, wire

log = structlog.get_logger(__name__)

Publish = Callable[[str, bytes], Awaitable[None]]
"""Takes a session id and the JSON of an evaluation; returns once it is in the log."""


@dataclass
class RecordHandler:
    """Handles records of ``built``; a record is finished when this returns.

    A record that cannot be read, or lies on a wrong partition, is counted and passed over: the reward-merger reads
    the same record and is the one to set it aside, so that nothing is dead-lettered or counted twice.
    """

    grader: Grader
    publish: Publish
    metrics: Metrics
    partitions: int
    concurrency: int
    """Evaluations at once, for each strategy by itself: a slow one does not take the places of a quick one."""
    concurrency_of: Mapping[str, int] = field(default_factory=dict)
    """The same for single strategies."""
    resource_class: ResourceClass | None = None
    """Only evaluators of this class are run, the others are for other members to run; None: all."""
    claims: ClaimCheck | None = None
    """Where large trajectories are kept; None: all lie in their records."""
    failpoints: Failpoints = field(default_factory=Failpoints)
    _places: dict[str, asyncio.Semaphore] = field(default_factory=dict)

    async def answer(self, received: Received) -> None:
        try:
            content = await content_of(received.value, self.claims)
            trajectory = self._read(received, content)
        except PoisonRecordError as error:
            log.warning("unreadable record passed over", reason=error.reason, offset=received.offset)
            self._count_once("unreadable_records")
            return
        if trajectory is None:
            return
        ours = [spec for spec in trajectory.spec.evaluators if self._is_ours(spec)]
        digest = hashlib.blake2b(content or b"", digest_size=16).hexdigest() if ours else ""
        async with asyncio.TaskGroup() as group:
            for spec in ours:
                group.create_task(self._evaluate(trajectory, digest, spec))

    def _count_once(self, name: str) -> None:
        """What every class reads, one of them counts."""
        if self.resource_class in (None, ResourceClass.LIGHT):
            self.metrics.count(name)

    def _is_ours(self, spec: EvaluatorSpec) -> bool:
        found = class_of(self.grader.registry, spec)
        return found is not None and self.resource_class in (None, found)

    def _read(self, received: Received, content: bytes | None) -> Trajectory | None:
        trajectory: Trajectory = decode(Trajectory, content, received.headers)
        if partition_of(trajectory.session_id.encode(), self.partitions) != received.partition:
            self._count_once("misplaced_records")
            return None
        return trajectory

    async def _evaluate(self, trajectory: Trajectory, digest: str, spec: EvaluatorSpec) -> None:
        limit = self.concurrency_of.get(spec.strategy, self.concurrency)
        async with self._places.setdefault(spec.strategy, asyncio.Semaphore(limit)):
            evaluation = await self.grader.grade(trajectory, digest, spec)
        self.failpoints.reach(Failpoint.EVALUATOR_BEFORE_PUBLISH)
        await self.publish(trajectory.session_id, wire(evaluation, self.grader.limits.bytes))
        self.failpoints.reach(Failpoint.EVALUATOR_AFTER_PUBLISH)
        self._count(evaluation, spec)

    def _count(self, evaluation: Evaluation, spec: EvaluatorSpec) -> None:
        verdict = "graded" if evaluation.not_graded is None else "not_graded"
        self.metrics.count("written_records", topic=EVALUATIONS.name)
        self.metrics.count("evaluations", evaluator=spec.strategy, verdict=verdict)
        self.metrics.observe("evaluation_seconds", evaluation.duration_seconds or 0.0, evaluator=spec.strategy)
        if evaluation.not_graded is not None:
            log.info(
                "not graded",
                session=trajectory_name(evaluation),
                evaluator=spec.label,
                reason=evaluation.not_graded,
                error=evaluation.metadata.get("error"),
            )


def class_of(registry: StrategyRegistry[BaseTrajectoryEvaluator], spec: EvaluatorSpec) -> ResourceClass | None:
    """None: it is answered elsewhere. What cannot be made takes nothing but the words that say so."""
    try:
        evaluator = registry.create(spec)
    except InvalidInputError:
        return ResourceClass.LIGHT
    return evaluator.resource_class if evaluator.answered_here else None


def trajectory_name(evaluation: Evaluation) -> str:
    return f"{evaluation.session_id}:{evaluation.attempt}"
