"""What has come into the topics, as plain lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.settings import KafkaSettings
from rollmill.topics import BATCHES, BUILT, COMPLETIONS, DEAD_LETTERS, EVALUATIONS, TRAJECTORIES, Topic

WATCHED = (COMPLETIONS, BUILT, EVALUATIONS, TRAJECTORIES, BATCHES, DEAD_LETTERS)
SECONDS = 5.0


async def watch_topics(settings: KafkaSettings, report: Callable[[str], None]) -> None:
    """Report the end offsets of the main topics whenever they have changed, until cancelled.

    Offsets count the markers of transactions, too: a measure of progress, not a number of records.
    """
    said = ""
    async with KafkaClients(settings).reading(reset="earliest") as consumer:
        while True:
            try:
                ends = await consumer.end_offsets([tp for topic in WATCHED for tp in _partitions(topic, settings)])
            except KafkaError as error:
                line = f"log: Kafka does not answer ({type(error).__name__})"
            else:
                line = _line(ends, settings)
            if line != said:
                report(line)
            said = line
            await asyncio.sleep(SECONDS)


def _partitions(topic: Topic, settings: KafkaSettings) -> list[TopicPartition]:
    name = topic.full_name(settings.prefix)
    return [TopicPartition(name, number) for number in range(topic.partitions(settings))]


def _line(ends: dict[TopicPartition, int], settings: KafkaSettings) -> str:
    sums = {topic.name: sum(ends[tp] for tp in _partitions(topic, settings)) for topic in WATCHED}
    return "log: " + ", ".join(f"{name} {offset}" for name, offset in sums.items())
