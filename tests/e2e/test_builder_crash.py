"""Kill the builder in the middle of its work: what comes out is the same, each trajectory once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from rollmill.codec import JSON, decode, encode
from rollmill.errors import EXIT_FENCED
from rollmill.models import (
    CompletionRecord,
    PolicySpan,
    PolicyVersion,
    SampledChoice,
    SessionClosed,
    SessionOpened,
    SessionSpec,
    Trajectory,
)
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import RestartPolicy, Supervisor, kafka_environment, service_program
from rollmill.settings import KafkaSettings
from rollmill.testing.topic_log import produce, read
from rollmill.topics import BUILT, COMPLETIONS, OUTCOMES, partition_of

pytestmark = [pytest.mark.kafka, pytest.mark.e2e]

SESSIONS = 200
TURNS = 3
END_OF_TURN = 9

Event = SessionOpened | CompletionRecord | SessionClosed


@pytest.fixture
async def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    made = KafkaSettings(bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=4)
    await apply_topics(made)
    return made


@pytest.fixture
async def supervisor(settings: KafkaSettings, tmp_path: Path) -> AsyncIterator[Supervisor]:
    environment = {"PATH": os.environ["PATH"], **kafka_environment(settings)}
    policy = RestartPolicy(first_pause=0.1)
    async with Supervisor(tmp_path, environment=environment, report=lambda _line: None, policy=policy) as made:
        yield made


def opened(session: int) -> SessionOpened:
    return SessionOpened(session_id=f"s{session}", spec=SessionSpec(group_id=f"g{session // 8}", group_size=8), at=1.0)


def turn(session: int, number: int) -> CompletionRecord:
    """Every prompt is the one before, its reply, and one new token: three calls make one trace."""
    prompt = [1, 100 + session]
    for before in range(number):
        prompt += [10 + before, END_OF_TURN, 50 + before]
    version = PolicyVersion(0, number)
    return CompletionRecord.model_validate(
        {
            "session_id": f"s{session}",
            "completion_id": f"s{session}-c{number}",
            "started_at": 2.0 + number,
            "ended_at": 2.5 + number,
            "policy": PolicySpan(before=version, after=version),
            "prompt_ids": prompt,
            "choices": [
                SampledChoice.model_validate(
                    {"token_ids": [10 + number, END_OF_TURN], "logprobs": [-0.5, -0.25], "finish_reason": "stop"}
                )
            ],
        }
    )


def closed(session: int) -> SessionClosed:
    return SessionClosed(session_id=f"s{session}", at=9.0)


async def send(settings: KafkaSettings, events: Sequence[Event]) -> None:
    await produce(settings, COMPLETIONS, [(event.session_id, encode(event, JSON)) for event in events])


def expected(session: int) -> tuple[list[int], list[int], list[int]]:
    """Prompt, response and mask of a session's one trace, written out by hand from the events."""
    response, mask = [], []
    for number in range(TURNS):
        if number:
            response.append(50 + number - 1)
            mask.append(0)
        response += [10 + number, END_OF_TURN]
        mask += [1, 1]
    return [1, 100 + session], response, mask


async def test_kill_9_in_the_middle_of_200_open_sessions(settings: KafkaSettings, supervisor: Supervisor) -> None:
    everyone = range(SESSIONS)
    await supervisor.start(service_program("builder", {}))
    await supervisor.wait_ready()
    await send(settings, [opened(n) for n in everyone] + [turn(n, 0) for n in everyone])
    await read(settings, OUTCOMES, SESSIONS // 4)  # it is at work now, and every session is open
    supervisor.kill("builder")
    await send(settings, [turn(n, 1) for n in everyone])
    await supervisor.wait_ready()
    supervisor.kill("builder")
    await send(settings, [turn(n, 2) for n in everyone] + [closed(n) for n in everyone])
    built = [decode(Trajectory, r.value, tuple(r.headers)) for r in await read(settings, BUILT, SESSIONS)]
    assert supervisor.starts("builder") == 3
    assert Counter(trajectory.session_id for trajectory in built) == {f"s{n}": 1 for n in everyone}
    for trajectory in built:
        session = int(trajectory.session_id[1:])
        (trace,) = trajectory.traces
        found = (trace.prompt_ids.tolist(), trace.response_ids.tolist(), trace.loss_mask.tolist())
        assert found == expected(session)
        assert {version.version: count for version, count in trace.versions_trained.items()} == {0: 2, 1: 2, 2: 2}


async def gone(supervisor: Supervisor, pid: int) -> None:
    try:
        async with asyncio.timeout(90):
            while supervisor.pid("builder") == pid:  # noqa: ASYNC110  # a process of another program
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"the zombie goes on:\n{supervisor.log_file('builder').read_text()[-4000:]}")


async def test_a_stopped_and_woken_zombie_exits_fenced_and_writes_nothing(
    settings: KafkaSettings, tmp_path: Path
) -> None:
    environment = {"PATH": os.environ["PATH"], **kafka_environment(settings)}
    async with Supervisor(tmp_path, environment=environment, report=lambda _line: None) as supervisor:
        await supervisor.start(service_program("builder", {}))
        await supervisor.wait_ready()
        await send(settings, [opened(1), turn(1, 0)])
        await read(settings, OUTCOMES, 1)
        zombie = supervisor.pid("builder")
        assert zombie is not None
        os.kill(zombie, signal.SIGSTOP)
        async with Supervisor(tmp_path / "new", environment=environment, report=lambda _line: None) as successor:
            await successor.start(service_program("builder", {}))
            await successor.wait_ready()
            os.kill(zombie, signal.SIGCONT)
            await send(settings, [turn(1, 1), turn(1, 2), closed(1)])
            built = await read(settings, BUILT, 1)
            await gone(supervisor, zombie)
            assert await supervisor.stop("builder") == EXIT_FENCED
            assert successor.pid("builder") is not None
    assert [record.key for record in built] == [b"s1"]
    assert built[0].partition == partition_of(b"s1", settings.partitions)
