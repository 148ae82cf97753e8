"""The evaluator's worker: members of the groups ``<prefix>evaluator.<resource class>`` that answer ``built``."""

from __future__ import annotations

import asyncio

import stamina
from aiokafka.errors import KafkaError

from rollmill.app import ServiceContext
from rollmill.claims import Claims
from rollmill.codec import JSON
from rollmill.errors import ConfigurationError
from rollmill.strategies import EvaluationContext, ResourceClass, evaluator_registry
from rollmill.telemetry.catalogue.services import VERDICTS
from rollmill.telemetry.metrics import Metrics
from rollmill.topics import BUILT, EVALUATIONS, partition_of
from rollmill_evaluator.answering import Answering, Publish
from rollmill_evaluator.grading import Grader
from rollmill_evaluator.group import Group
from rollmill_evaluator.sandbox.choosing import container_sandbox, local_sandbox
from rollmill_evaluator.settings import EvaluatorSettings

NAME = "evaluator"
MEMBER = "evaluator group"
PUBLISH_ATTEMPTS = 5


async def work(context: ServiceContext) -> None:
    """Evaluate until ``context.stop``; then finish, commit and leave the groups.

    One group for each resource class: each reads all of ``built``, takes in as much as it has room for, and commits
    its own position, so that none waits for another (and so that classes can run in processes of their own).
    """
    settings = context.settings
    if not isinstance(settings, EvaluatorSettings):
        raise ConfigurationError(f"the evaluator needs EvaluatorSettings, not {type(settings).__name__}")
    grader = Grader(evaluator_registry(), settings.limits, context.clock, surroundings(settings))
    begin_counting(context.metrics, settings)
    async with asyncio.TaskGroup() as members:
        for resource_class in settings.resource_classes:
            members.create_task(_member(context, settings, grader, resource_class))


async def _member(
    context: ServiceContext, settings: EvaluatorSettings, grader: Grader, resource_class: ResourceClass
) -> None:
    answering = Answering(
        grader=grader,
        publish=publisher(context, settings),
        metrics=context.metrics,
        partitions=settings.partitions,
        concurrency=settings.evaluator_concurrency,
        concurrency_of=settings.evaluator_concurrency_of,
        resource_class=resource_class,
        claims=Claims.of(settings),
        failpoints=context.failpoints,
    )
    group = Group(
        answering.answer,
        topic=BUILT,
        prefix=settings.prefix,
        group_id=group_id(settings.prefix, resource_class),
        clients=context.clients,
        limits=settings.group_limits,
        metrics=context.metrics,
        labels={"reads": resource_class.label},
    )
    await membership(group, context, f"{MEMBER} {resource_class.label}")


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


async def membership(group: Group, context: ServiceContext, name: str) -> None:
    """Run a group until ``context.stop``; ready, as part ``name``, while it is joined."""
    context.health.expect(name)
    announcing = asyncio.create_task(_announce(group, context, name))
    try:
        await group.run(context.stop)
    finally:
        announcing.cancel()
        context.health.ready(name, ready=False)


def surroundings(settings: EvaluatorSettings) -> EvaluationContext:
    """What evaluators of this process may use; sandboxes are looked for when first needed."""
    return EvaluationContext(
        deadline_seconds=settings.evaluator_seconds,
        sandbox=local_sandbox(settings.sandboxes),
        containers=container_sandbox(settings.sandboxes),
        sources=settings.evaluator_sources,
        any_url=settings.evaluator_any_url,
        services={name: address.revealed for name, address in settings.evaluator_services.items()},
    )


async def _announce(group: Group, context: ServiceContext, name: str) -> None:
    await group.joined.wait()
    context.health.ready(name)


def publisher(context: ServiceContext, settings: EvaluatorSettings) -> Publish:
    """Publishes to the session's partition and returns when the log has it; raises KafkaError after some tries."""
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
