"""Tasks that have stopped over their limit of dead letters, read from their changelogs, and decisions about them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rollmill.codec import JSON, encode
from rollmill.errors import InvalidInputError
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.log_reader import Log
from rollmill.runtime.stream.task_stop import DECISION, NOTES, StopNotes, TaskDecision, TaskStop
from rollmill.settings import KafkaSettings
from rollmill.topics import STATE_BATCHER, STATE_BUILDER, STATE_REWARD_MERGER, Topic

CHANGELOGS = {"builder": STATE_BUILDER, "reward-merger": STATE_REWARD_MERGER, "batcher": STATE_BATCHER}
"""By stage."""


@dataclass(frozen=True)
class StoppedTask:
    """A task with a record in hand that it did not process."""

    stage: str
    number: int
    stop: TaskStop
    decision: TaskDecision | None
    """About this record; the task has not gone on yet."""

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.number}"


async def read_stopped(settings: KafkaSettings) -> list[StoppedTask]:
    """All stopped tasks, in the order of stages and partitions."""
    async with Log.open(settings) as log:
        return [task for stage, changelog in CHANGELOGS.items() for task in await _stopped(log, stage, changelog)]


async def _stopped(log: Log, stage: str, changelog: Topic) -> list[StoppedTask]:
    notes: dict[int, StopNotes] = defaultdict(StopNotes)
    async for record in log.read(changelog):
        key = (record.key or b"").decode("utf-8", "replace")
        if key in NOTES:
            notes[record.partition] = notes[record.partition].updated({key: record.value})
    return [StoppedTask(stage, number, note.stop, note.decision) for number, note in sorted(notes.items()) if note.stop]


async def find_stopped(settings: KafkaSettings, name: str) -> StoppedTask:
    """Raises InvalidInputError where no task of this name has stopped."""
    stopped = {task.name: task for task in await read_stopped(settings)}
    if name not in stopped:
        names = f"those that have: {', '.join(stopped)}" if stopped else "none has"
        raise InvalidInputError(f"the task {name!r} has not stopped over its limit of dead letters; {names}")
    return stopped[name]


async def decide(settings: KafkaSettings, task: StoppedTask, decision: TaskDecision) -> None:
    """Write a decision about a stopped task into its changelog, where its process looks for it."""
    topic = CHANGELOGS[task.stage].full_name(settings.prefix)
    async with KafkaClients(settings).producer() as producer:
        await producer.send_and_wait(topic, encode(decision, JSON), DECISION.encode(), task.number)
