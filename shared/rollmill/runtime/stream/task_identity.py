"""Which tasks there are and what each is called (rule T1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka import TopicPartition

from rollmill.runtime.stream.processor import Processor
from rollmill.settings import KafkaSettings, ServiceSettings
from rollmill.topics import Partitioning, Topic


@dataclass(frozen=True)
class TaskIdentity:
    """The unit of ownership: one input partition number of a stage, or all of them for a single-task stage."""

    stage: str
    number: int
    prefix: str
    inputs: tuple[tuple[Topic, TopicPartition], ...]
    changelog: TopicPartition

    @property
    def transactional_id(self) -> str:
        return f"{self.prefix}{self.stage}.{self.number}"

    @property
    def group_id(self) -> str:
        """Group of the committed offsets, for lag displays."""
        return f"{self.prefix}{self.stage}"

    def slot(self, partition: TopicPartition) -> str:
        """``topic/partition`` without the prefix, as positions are written down."""
        return f"{partition.topic.removeprefix(self.prefix)}/{partition.partition}"


def task_identity(stage: Processor[Any, Any], number: int, settings: KafkaSettings) -> TaskIdentity:
    single = stage.state_topic.partitioning is Partitioning.SINGLE
    inputs = tuple(
        (topic, TopicPartition(topic.full_name(settings.prefix), partition))
        for topic in stage.inputs
        for partition in (range(topic.partitions(settings)) if single else [number])
    )
    changelog = TopicPartition(stage.state_topic.full_name(settings.prefix), number)
    return TaskIdentity(stage.name, number, settings.prefix, inputs, changelog)


def own_tasks(stage: Processor[Any, Any], settings: ServiceSettings) -> Sequence[TaskIdentity]:
    """The tasks of this process: p mod n = k."""
    count = stage.state_topic.partitions(settings)
    return [
        task_identity(stage, number, settings)
        for number in range(count)
        if number % settings.processes == settings.process_index
    ]
