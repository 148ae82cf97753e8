"""The evaluator's worker: a member of the group ``<prefix>evaluator`` that answers ``built``."""

from __future__ import annotations

import asyncio

import stamina
from aiokafka.errors import KafkaError

from rollmill.app import ServiceContext
from rollmill.claims import Claims
from rollmill.codec import JSON
from rollmill.errors import ConfigurationError
from rollmill.strategies import EvaluationContext, evaluator_registry
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
    """Evaluate until ``context.stop``; then finish, commit and leave the group."""
    settings = context.settings
    if not isinstance(settings, EvaluatorSettings):
        raise ConfigurationError(f"the evaluator needs EvaluatorSettings, not {type(settings).__name__}")
    answering = Answering(
        grader=Grader(evaluator_registry(), settings.limits, context.clock, surroundings(settings)),
        publish=publisher(context, settings),
        metrics=context.metrics,
        partitions=settings.partitions,
        concurrency=settings.evaluator_concurrency,
        claims=Claims.of(settings),
        failpoints=context.failpoints,
    )
    group = Group(
        answering.answer,
        topic=BUILT,
        prefix=settings.prefix,
        group_id=f"{settings.prefix}{NAME}",
        clients=context.clients,
        limits=settings.group_limits,
        metrics=context.metrics,
    )
    context.health.expect(MEMBER)
    announcing = asyncio.create_task(_announce(group, context))
    try:
        await group.run(context.stop)
    finally:
        announcing.cancel()
        context.health.ready(MEMBER, ready=False)


def surroundings(settings: EvaluatorSettings) -> EvaluationContext:
    """What evaluators of this process may use; sandboxes are looked for when first needed."""
    return EvaluationContext(
        deadline_seconds=settings.evaluator_seconds,
        sandbox=local_sandbox(settings.sandboxes),
        containers=container_sandbox(settings.sandboxes),
        sources=settings.evaluator_sources,
    )


async def _announce(group: Group, context: ServiceContext) -> None:
    await group.joined.wait()
    context.health.ready(MEMBER)


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
