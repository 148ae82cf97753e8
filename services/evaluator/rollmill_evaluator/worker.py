"""The evaluator's workers: one member of each group ``<prefix>evaluator.<resource class>``, reading ``built``."""

from __future__ import annotations

import asyncio

import stamina
from aiokafka.errors import KafkaError

from rollmill.codec import JSON
from rollmill.errors import ConfigurationError
from rollmill.runtime.app import ServiceContext
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.telemetry.catalogue.services import VERDICTS
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies import EvaluationContext, ResourceClass, evaluator_registry
from rollmill.topics import BUILT, EVALUATIONS, partition_of
from rollmill_evaluator.consumer.concurrent_consumer import ConcurrentConsumer, run_member
from rollmill_evaluator.delivery.record_handler import PublishEvaluation, RecordHandler
from rollmill_evaluator.grading import Grader
from rollmill_evaluator.sandbox.selection import container_sandbox, local_sandbox
from rollmill_evaluator.settings import EvaluatorSettings

NAME = "evaluator"
MEMBER = "evaluator group"
PUBLISH_ATTEMPTS = 5


async def work(context: ServiceContext) -> None:
    """Evaluate until ``context.stop``; then finish, commit and leave the groups.

    One group for each resource class: each reads all of ``built``, takes in as much as it has capacity for, and
    commits its own position, so that no class waits for another (and so that classes can run in separate processes).
    """
    settings = context.settings
    if not isinstance(settings, EvaluatorSettings):
        raise ConfigurationError(f"the evaluator needs EvaluatorSettings, not {type(settings).__name__}")
    grader = Grader(
        evaluator_registry(), settings.limits, context.clock, evaluation_context(settings), settings.spec_maxima
    )
    begin_counting(context.metrics, settings)
    async with asyncio.TaskGroup() as members:
        for resource_class in settings.resource_classes:
            members.create_task(_run_class(context, settings, grader, resource_class))


async def _run_class(
    context: ServiceContext, settings: EvaluatorSettings, grader: Grader, resource_class: ResourceClass
) -> None:
    handler = RecordHandler(
        grader=grader,
        publish=evaluation_publisher(context, settings),
        metrics=context.metrics,
        partitions=settings.partitions,
        concurrency=settings.evaluator_concurrency,
        concurrency_of=settings.evaluator_concurrency_of,
        resource_class=resource_class,
        claim_check=ClaimCheck.of(settings),
        failpoints=context.failpoints,
    )
    consumer = ConcurrentConsumer(
        handler.handle,
        topic=BUILT,
        prefix=settings.prefix,
        group_id=group_id(settings.prefix, resource_class),
        clients=context.clients,
        limits=settings.group_limits,
        metrics=context.metrics,
        labels={"reads": resource_class.label},
    )
    await run_member(consumer, context, f"{MEMBER} {resource_class.label}")


def begin_counting(metrics: Metrics, settings: EvaluatorSettings) -> None:
    """Evaluators that are registered, or named in the settings, are counted from 0."""
    registry = evaluator_registry()
    registered = {name for name in registry.names if registry.find(name).answered_here}
    for name in sorted(registered | set(settings.evaluator_concurrency_of)):
        metrics.begin("evaluation_seconds", evaluator=name)
        for verdict in VERDICTS:
            metrics.begin("evaluations", evaluator=name, verdict=verdict)


def group_id(prefix: str, resource_class: ResourceClass) -> str:
    return f"{prefix}{NAME}.{resource_class.label}"


def evaluation_context(settings: EvaluatorSettings) -> EvaluationContext:
    """What evaluators of this process may use; sandboxes are looked for when first needed."""
    return EvaluationContext(
        deadline_seconds=settings.evaluator_seconds,
        sandbox=local_sandbox(settings.sandboxes),
        containers=container_sandbox(settings.sandboxes),
        sources=settings.evaluator_sources,
        any_url=settings.evaluator_any_url,
        networks=tuple(map(str, settings.evaluator_networks)),
        services={name: address.revealed for name, address in settings.evaluator_services.items()},
    )


def evaluation_publisher(context: ServiceContext, settings: EvaluatorSettings) -> PublishEvaluation:
    """Publishes to the session's partition and returns when the log has the record.

    The function raises KafkaError after `PUBLISH_ATTEMPTS` tries.
    """
    topic = EVALUATIONS.full_name(settings.prefix)

    async def publish(session_id: str, value: bytes) -> None:
        key = session_id.encode()
        async for attempt in stamina.retry_context(on=KafkaError, attempts=PUBLISH_ATTEMPTS, timeout=None):
            with attempt:
                await context.broker.publish(
                    value,
                    topic,
                    key=key,
                    partition=partition_of(key, settings.partitions),
                    headers={"content-type": JSON},
                )

    return publish
