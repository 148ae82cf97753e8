"""Another number of builder processes under load, while the old ones are alive: nothing lost, nothing doubled."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import count

import pytest

from rollmill.codec import JSON, decode, encode
from rollmill.errors import EXIT_DRAINED, EXIT_FENCED
from rollmill.models import (
    CompletionRecord,
    Disposition,
    SessionClosed,
    SessionOpened,
    SessionSpec,
    TokenDisposition,
    Trajectory,
)
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import kafka_environment
from rollmill.settings import KafkaSettings
from rollmill.testing.processes import ServiceProcess, service_process
from rollmill.testing.samples.sessions import completion
from rollmill.testing.topic_log import JSON_HEADERS, read, read_all
from rollmill.topics import BUILT, COMPLETIONS, OUTCOMES

pytestmark = [pytest.mark.kafka, pytest.mark.e2e]

TURNS = 3
PAUSE = 0.02
PATIENCE = 90.0

Event = SessionOpened | CompletionRecord | SessionClosed


def events(session: int) -> list[Event]:
    """Every prompt is the one before, its reply, and one new token."""
    name, prompt = f"s{session}", [1, 100 + session]
    made: list[Event] = [SessionOpened(session_id=name, spec=SessionSpec(), at=1.0)]
    for turn in range(TURNS):
        made.append(completion(f"{name}-{turn}", prompt, [10 + turn, 9], at=2.0 + turn, session_id=name))
        prompt = [*prompt, 10 + turn, 9, 50 + turn]
    return [*made, SessionClosed(session_id=name, at=9.0)]


class Load:
    """Sessions that begin all the time, each a step of its life behind the one that began after it."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self.begun = 0
        self.stop = asyncio.Event()

    async def run(self) -> None:
        """Until ``stop``; then those that have begun end."""
        async with KafkaClients(self._settings).producer() as producer:
            for wave in self._waves():
                sends = [
                    await producer.send(
                        COMPLETIONS.full_name(self._settings.prefix),
                        encode(event, JSON),
                        event.session_id.encode(),
                        headers=list(JSON_HEADERS),
                    )
                    for event in wave
                ]
                await asyncio.gather(*sends)
                await asyncio.sleep(PAUSE)

    def _waves(self) -> Iterator[list[Event]]:
        living: list[list[Event]] = []
        for number in count():
            if not self.stop.is_set():
                living.append(events(number))
                self.begun = number + 1
            if not living:
                return
            yield [session.pop(0) for session in living]
            living = [session for session in living if session]


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    made = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=4)
    await apply_topics(made)
    return made


async def start(stack: AsyncExitStack, settings: KafkaSettings, processes: int) -> list[ServiceProcess]:
    """All of ``processes`` builders."""
    common = {**kafka_environment(settings), "ROLLMILL_PROCESSES": str(processes)}
    return [
        await stack.enter_async_context(
            service_process("rollmill_builder", {**common, "ROLLMILL_PROCESS_INDEX": str(index)})
        )
        for index in range(processes)
    ]


async def at_work(builders: list[ServiceProcess]) -> None:
    for builder in builders:
        await builder.wait_for_log(b"task ready")


async def ends_of(builders: list[ServiceProcess]) -> list[int]:
    return [await asyncio.wait_for(builder.process.wait(), PATIENCE) for builder in builders]


async def test_from_two_to_three_to_one_under_load(settings: KafkaSettings) -> None:
    load = Load(settings)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        group.create_task(load.run())
        two = await start(stack, settings, 2)
        await at_work(two)
        three = await start(stack, settings, 3)
        await at_work(three)
        assert await ends_of(two) == [EXIT_FENCED] * 2
        (one,) = await start(stack, settings, 1)
        assert await ends_of(three) == [EXIT_FENCED] * 3
        load.stop.set()
        records = await read(settings, BUILT, lambda found: len(found) >= load.begun)
        assert await one.stop() == EXIT_DRAINED
    check([decode(Trajectory, record.value, tuple(record.headers)) for record in records], load.begun)
    captured = [item for item in await read_all(settings, OUTCOMES) if item.disposition is Disposition.CAPTURED]
    assert calls_of(captured) == {f"s{n}-{turn}": 2 for n in range(load.begun) for turn in range(TURNS)}


def check(built: list[Trajectory], sessions: int) -> None:
    assert Counter(item.session_id for item in built) == {f"s{n}": 1 for n in range(sessions)}
    for item in built:
        (trace,) = item.traces
        assert trace.prompt_ids.tolist() == [1, 100 + int(item.session_id[1:])]
        assert trace.response_ids.tolist() == [10, 9, 50, 11, 9, 51, 12, 9]
        assert trace.loss_mask.tolist() == [1, 1, 0, 1, 1, 0, 1, 1]


def calls_of(captured: list[TokenDisposition]) -> Counter[str]:
    """Captured tokens by call."""
    found: Counter[str] = Counter()
    for item in captured:
        for unit in item.units:
            found[unit.completion_id] += unit.tokens
    return found
