"""A replay, from its plan to its comparison."""

from __future__ import annotations

from collections.abc import Callable

from aiokafka import TopicPartition

from rollmill.errors import InvalidInputError
from rollmill.ops.replay.batch import BATCHER, batch
from rollmill.ops.replay.build import BUILDER, build
from rollmill.ops.replay.comparison import Comparison
from rollmill.ops.replay.evaluate import EVALUATOR, copy_evaluations, grade
from rollmill.ops.replay.merge import MERGER, merge
from rollmill.ops.replay.plan import Plan
from rollmill.ops.replay.stages import check_options, settings_of, stage_of
from rollmill.ops.replay.summary import summarize
from rollmill.ops.replay.writer import open_writer
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.log_reader import Log
from rollmill.settings import KafkaSettings
from rollmill.topics import REGISTRY

STAGES = (BUILDER, MERGER, BATCHER)


def no_report(_line: str) -> None:
    """Reports nothing."""


async def replay(plan: Plan, report: Callable[[str], None] = no_report) -> Comparison:
    """Read the whole live log, write the new prefix, compare. Ends by itself.

    ``report`` is called with what is done next. Raises InvalidInputError for a plan that cannot be followed, before
    anything is written.
    """
    plan.check()
    check_options(plan.options, (*STAGES, EVALUATOR))
    for service in STAGES:
        stage_of(service, settings_of(service, plan.into, plan.options))
    await apply_topics(plan.into)
    await _refuse_used(plan.into)
    async with open_writer(plan.into) as writer, Log.open(plan.live) as live, Log.open(plan.into) as into:
        report("building")
        selection = await build(live, plan, writer)
        report(f"grading {len(selection.taken)} sessions")
        if plan.evaluators is None:
            await copy_evaluations(live, selection.taken, writer)
        else:
            await grade(into, plan, writer)
        report("merging")
        await merge(into, plan, writer)
        report("batching")
        await batch(live, plan, writer)
    report("comparing")
    old = await summarize(plan.live, selection.taken)
    new = await summarize(plan.into, selection.taken)
    return Comparison(old, new, len(selection.taken), len(selection.left_out))


async def _refuse_used(settings: KafkaSettings) -> None:
    places = [
        TopicPartition(topic.full_name(settings.prefix), number)
        for topic in REGISTRY
        for number in range(topic.partitions(settings))
    ]
    async with KafkaClients(settings).reading(reset="earliest") as consumer:
        ends = await consumer.end_offsets(places)
    used = sorted({place.topic for place, end in ends.items() if end})
    if used:
        raise InvalidInputError(f"{used[0]} has records already: a replay needs its own, empty prefix")
