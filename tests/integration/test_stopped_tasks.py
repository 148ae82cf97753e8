"""A task over its limit of dead letters: it is shown, and an operator lets it go on (F2)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from rollmill.cli.stopped_tasks import decide_about, print_stopped
from rollmill.errors import FatalError, InvalidInputError
from rollmill.ops.dlq import LetterState, read_letters
from rollmill.ops.stopped_tasks import StoppedTask, read_stopped
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.stream import InputRecord, Outputs, Processor, StateView, TaskLocal
from rollmill.runtime.stream.runner import run_stages
from rollmill.runtime.stream.task_stop import Decision
from rollmill.runtime.stream.task_tools import TaskTools
from rollmill.runtime.telemetry.clock import SystemClock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.settings import ServiceSettings
from rollmill.testing.topic_log import produce
from rollmill.topics import COMPLETIONS, STATE_BUILDER, partition_of

pytestmark = pytest.mark.kafka

LIMIT = 3
KEYS = [f"k{number}" for number in range(200)]
FIRST, SECOND = ([key for key in KEYS if partition_of(key.encode(), 2) == number] for number in range(2))


@dataclass
class Deploy(Processor[int, TaskLocal]):
    """In place of the builder: ``bug`` is a fault until it is ``mended``."""

    name = "builder"
    inputs = (COMPLETIONS,)
    state_topic = STATE_BUILDER

    mended: bool = False
    done: list[str] = field(default_factory=list)

    def task_local(self) -> TaskLocal:
        return TaskLocal()

    def process(self, _state: StateView[int], record: InputRecord, _local: TaskLocal) -> Outputs:
        if record.value == b"bug" and not self.mended:
            raise KeyError("a bug")
        self.done.append(record.key.decode())
        return Outputs()

    def apply(self, _key: str, value: int | None, _payload: bytes, _local: TaskLocal) -> int:
        return value or 0


@dataclass
class Service:
    settings: ServiceSettings
    stage: Deploy
    health: Health
    job: asyncio.Task[None]

    async def send(self, keys: Sequence[str], value: bytes = b"bug") -> None:
        await produce(self.settings, COMPLETIONS, [(key, value) for key in keys], headers=())

    async def decide(self, decision: Decision) -> None:
        await decide_about(self.settings, "builder.0", decision, "ada", "a test")

    async def stopped(self, seen: Callable[[list[StoppedTask]], bool] = bool) -> list[StoppedTask]:
        async with asyncio.timeout(30):
            while not seen(found := await read_stopped(self.settings)):
                pass
        return found

    async def processed(self, *keys: str) -> None:
        async with asyncio.timeout(30):
            while not set(keys) <= set(self.stage.done):  # noqa: ASYNC110  # the stage has no event for it
                await asyncio.sleep(0.01)


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> ServiceSettings:
    made = ServiceSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers,
        prefix=topic_prefix,
        partitions=2,
        poll_ms=20,
        dead_letter_limit=LIMIT,
    )
    await apply_topics(made)
    return made


@asynccontextmanager
async def running(settings: ServiceSettings, stage: Deploy) -> AsyncIterator[Service]:
    health, stop = Health(), asyncio.Event()
    tools = TaskTools(settings, KafkaClients(settings), SystemClock(), Metrics("builder"), health)
    job = asyncio.create_task(run_stages([stage], tools, stop))
    try:
        yield Service(settings, stage, health, job)
    finally:
        stop.set()
        with suppress(FatalError):
            await job


async def test_f2_a_stopped_task_shows_its_record_and_goes_on_after_a_retry(settings: ServiceSettings) -> None:
    async with running(settings, Deploy()) as service:
        await service.send(FIRST[:8])
        (task,) = await service.stopped()
        assert (task.name, task.stop.key, task.stop.reason) == ("builder.0", FIRST[LIMIT], "stage_error")
        assert "a bug" in task.stop.error
        await service.send(SECOND[:1], b"good")
        await service.processed(SECOND[0])
        assert service.health.readiness() == (503, {"ready": False, "waiting": ["builder.0"]})
        service.stage.mended = True
        await service.decide(Decision.RETRY)
        await service.processed(*FIRST[LIMIT:8])
        assert await service.stopped(lambda found: not found) == []
        assert service.health.readiness()[0] == 200
        assert len(await read_letters(settings)) == LIMIT


@pytest.mark.parametrize(
    ("decision", "reason", "state"),
    [(Decision.SET_ASIDE, "set_aside", LetterState.OPEN), (Decision.SKIP, "skipped", LetterState.DROPPED)],
)
async def test_f2_the_record_in_hand_is_passed_over_and_the_next_fault_stops_again(
    settings: ServiceSettings, decision: Decision, reason: str, state: LetterState
) -> None:
    async with running(settings, Deploy()) as service:
        await service.send([*FIRST[: LIMIT + 1]])
        await service.send(FIRST[10:12], b"good")
        await service.send(FIRST[LIMIT + 1 : LIMIT + 2])
        await service.stopped()
        await service.decide(decision)
        await service.processed(*FIRST[10:12])
        (task,) = await service.stopped(lambda found: bool(found) and found[0].stop.key == FIRST[LIMIT + 1])
        assert task.decision is None
        last = list((await read_letters(settings)).values())[-1]
    assert (last.key.decode(), last.info.reason, last.state) == (FIRST[LIMIT], reason, state)
    assert "ada: a test" in last.info.error


async def test_f2_a_decision_waits_for_a_process_that_has_ended(settings: ServiceSettings) -> None:
    alone = settings.model_copy(update={"processes": 2, "process_index": 0})
    async with running(alone, Deploy()) as service:
        await service.send(FIRST[:8])
        with pytest.raises(FatalError, match="rollmill tasks"):
            await service.job
        await service.stopped()
        await service.decide(Decision.SET_ASIDE)
    async with running(alone, Deploy()) as service:
        with pytest.raises(FatalError):
            await service.job
        (task,) = await service.stopped()
        assert (task.stop.key, task.decision) == (FIRST[LIMIT + 1], None)


async def test_f2_a_restart_without_a_decision_keeps_the_record_in_hand(settings: ServiceSettings) -> None:
    alone = settings.model_copy(update={"processes": 2, "process_index": 0})
    for _ in range(2):
        async with running(alone, Deploy()) as service:
            await service.send(FIRST[:8])
            with pytest.raises(FatalError):
                await service.job
            (task,) = await service.stopped()
            assert task.stop.key == FIRST[LIMIT]
    async with running(alone.model_copy(update={"dead_letter_limit": 100}), Deploy()) as service:
        assert await service.stopped(lambda found: not found) == []


async def test_tasks_are_shown_and_decided_on_the_command_line(
    settings: ServiceSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(settings, Deploy()) as service:
        assert await print_stopped(settings, as_json=False) == []
        assert "no task has stopped" in capsys.readouterr().out
        with pytest.raises(InvalidInputError, match=r"'builder\.7' has not stopped"):
            await decide_about(settings, "builder.7", Decision.RETRY, None, "")
        await service.send(FIRST[:8])
        await service.stopped()
        await print_stopped(settings, as_json=True)
        shown = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (shown["task"], shown["reason"], shown["decision"]) == ("builder.0", "stage_error", None)
        await print_stopped(settings, as_json=False)
        assert f"(key {FIRST[LIMIT]}) in hand" in capsys.readouterr().out
        with pytest.raises(InvalidInputError, match=r"those that have: builder\.0"):
            await decide_about(settings, "batcher.0", Decision.RETRY, None, "")
