"""Handles one record of ``built``: runs every evaluator of its spec and publishes each evaluation."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import structlog

from rollmill.errors import PoisonRecordError
from rollmill.models import Evaluation, EvaluatorSpec, Trajectory
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.failpoints import Failpoint, Failpoints
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies import (
    AboveMaximumError,
    BaseTrajectoryEvaluator,
    ResourceClass,
    StrategyRegistry,
    require_countable,
)
from rollmill.strategies.foreign_code import contained
from rollmill.topics import EVALUATIONS, partition_of
from rollmill_evaluator.consumer.in_flight import ReceivedRecord
from rollmill_evaluator.delivery.trajectory_record import read_trajectory
from rollmill_evaluator.grading import Grader, encode_evaluation

log = structlog.get_logger(__name__)

PublishEvaluation = Callable[[str, bytes], Awaitable[None]]
"""Takes a session id and the JSON of an evaluation; returns once the record is in the log."""


@dataclass
class RecordHandler:
    """Handles records of ``built``; a record is finished when `handle` returns.

    A record that cannot be read, or that is in a wrong partition, is counted and skipped: the reward-merger reads the
    same record and quarantines it, so that it is dead-lettered and counted once.
    """

    grader: Grader
    publish: PublishEvaluation
    metrics: Metrics
    partitions: int
    concurrency: int
    """Evaluations at once, for each strategy by itself: a slow strategy takes no capacity from a fast one."""
    concurrency_of: Mapping[str, int] = field(default_factory=dict)
    """The same for single strategies."""
    resource_class: ResourceClass | None = None
    """Only evaluators of this class are run; other members run the others. None: all."""
    claim_check: ClaimCheck | None = None
    """Where large trajectories are stored; None: all are in their records."""
    failpoints: Failpoints = field(default_factory=Failpoints)
    _semaphores: dict[str, asyncio.Semaphore] = field(default_factory=dict)

    async def handle(self, received: ReceivedRecord) -> None:
        try:
            trajectory, content = await read_trajectory(received, self.claim_check)
        except PoisonRecordError as error:
            log.warning(
                "unreadable record skipped; the reward-merger quarantines it",
                reason=error.reason,
                offset=received.offset,
            )
            self._count_once("unreadable_records")
            return
        if partition_of(trajectory.session_id.encode(), self.partitions) != received.partition:
            self._count_once("misplaced_records")
            return
        specs = [spec for spec in trajectory.spec.evaluators if self._is_ours(spec)]
        digest = hashlib.blake2b(content, digest_size=16).hexdigest() if specs else ""
        async with asyncio.TaskGroup() as tasks:
            for spec in specs:
                tasks.create_task(self._evaluate(trajectory, digest, spec))

    def _count_once(self, name: str) -> None:
        """Every class reads every record: one class counts it."""
        if self.resource_class in (None, ResourceClass.LIGHT):
            self.metrics.count(name)

    def _is_ours(self, spec: EvaluatorSpec) -> bool:
        try:
            require_countable([spec.config], self.grader.maxima)
            found = resource_class_of(self.grader.registry, spec)
        except AboveMaximumError:  # the grader refuses it
            found = ResourceClass.LIGHT
        return found is not None and self.resource_class in (None, found)

    async def _evaluate(self, trajectory: Trajectory, digest: str, spec: EvaluatorSpec) -> None:
        limit = self.concurrency_of.get(spec.strategy, self.concurrency)
        async with self._semaphores.setdefault(spec.strategy, asyncio.Semaphore(limit)):
            evaluation = await self.grader.grade(trajectory, digest, spec)
        self.failpoints.reach(Failpoint.EVALUATOR_BEFORE_PUBLISH)
        await self.publish(trajectory.session_id, encode_evaluation(evaluation, self.grader.limits.bytes))
        self.failpoints.reach(Failpoint.EVALUATOR_AFTER_PUBLISH)
        self._record_metrics(evaluation, spec)

    def _record_metrics(self, evaluation: Evaluation, spec: EvaluatorSpec) -> None:
        verdict = "graded" if evaluation.not_graded is None else "not_graded"
        self.metrics.count("written_records", topic=EVALUATIONS.name)
        self.metrics.count("evaluations", evaluator=spec.strategy, verdict=verdict)
        self.metrics.observe("evaluation_seconds", evaluation.duration_seconds or 0.0, evaluator=spec.strategy)
        if evaluation.not_graded is not None:
            log.info(
                "not graded",
                session=f"{evaluation.session_id}:{evaluation.attempt}",
                evaluator=spec.label,
                reason=evaluation.not_graded,
                error=evaluation.metadata.get("error"),
            )


def resource_class_of(registry: StrategyRegistry[BaseTrajectoryEvaluator], spec: EvaluatorSpec) -> ResourceClass | None:
    """The class that runs ``spec``; None: it is evaluated outside of this service.

    Where the evaluator cannot be constructed, or is of no class, the spec is LIGHT: its failure is to be published.
    """
    try:
        evaluator = registry.create(spec)
        with contained():
            return ResourceClass(evaluator.resource_class) if evaluator.answered_here else None
    except Exception:  # noqa: BLE001  # foreign code can raise anything; `Grader` reports it
        return ResourceClass.LIGHT
