"""A trainer that is killed again and again sees, from each checkpoint on, what an undisturbed one sees."""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollmill.codec import decode
from rollmill.models import Disposition, PolicyVersion, Rewound, TokenDisposition, outcome
from rollmill.ops.ledger import Balance, Reconciliation
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.kafka.log_reader import Log
from rollmill.settings import KafkaSettings
from rollmill.testing.samples.batches import SampleTrace, step_values
from rollmill.topics import ACKS, BATCHES, OUTCOMES, Topic
from rollmill.trainer.batches.state import StreamState

pytestmark = pytest.mark.kafka

PROGRAM = Path(__file__).parents[1] / "programs" / "checkpointing_trainer.py"
STEPS = 50
KILLS = 8
Lineage = list[tuple[int, str, str]]
"""Step, digest of its batch, weights after it."""


@pytest.fixture
def settings(kafka_broker: EmbeddedKafka, topic_prefix: str) -> KafkaSettings:
    settings = KafkaSettings(
        bootstrap_servers=kafka_broker.bootstrap_servers, prefix=topic_prefix, partitions=2, batch_partitions=1
    )
    asyncio.run(apply_topics(settings))
    return settings


def rollouts(step: int) -> list[list[SampleTrace]]:
    """Two micro-batches of random traces; some are too old when they are handed over."""
    rng = random.Random(step)  # noqa: S311  # the same traces in every run
    return [[rollout(step, micro, number, rng) for number in range(rng.randint(1, 4))] for micro in range(2)]


def rollout(step: int, micro: int, number: int, rng: random.Random) -> SampleTrace:
    size = rng.randint(1, 9)
    return SampleTrace(
        f"s{step}-{micro}-{number}",
        reply=tuple(rng.randrange(1000) for _ in range(size)),
        log_probs=tuple(-rng.random() for _ in range(size)),
        version=PolicyVersion(0, max(0, step - rng.randint(0, 4))),
        advantage=rng.uniform(-1, 1),
        group_id=f"g{step}",
    )


async def cut_all(settings: KafkaSettings) -> None:
    async with KafkaClients(settings).producer(f"{settings.prefix}test-batcher") as producer:
        for step in range(STEPS):
            await producer.begin_transaction()
            for value in step_values(step, [rollouts(step)], max_staleness=3)[0]:
                await (await producer.send(BATCHES.full_name(settings.prefix), value, b"step", partition=0))
            await producer.commit_transaction()


@contextmanager
def trainer(settings: KafkaSettings, directory: Path) -> Iterator[subprocess.Popen[str]]:
    environment = {
        **os.environ,
        "ROLLMILL_BOOTSTRAP_SERVERS": settings.bootstrap_servers,
        "ROLLMILL_PREFIX": settings.prefix,
        "ROLLMILL_PARTITIONS": "2",
        "ROLLMILL_BATCH_PARTITIONS": "1",
    }
    command = (sys.executable, str(PROGRAM), str(directory), str(STEPS))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def run(settings: KafkaSettings, directory: Path, lines: int | None = None) -> tuple[Lineage, int | None]:
    """What a process says until it ends, or until it is killed after so many lines; and its exit code then."""
    said: list[str] = []
    with trainer(settings, directory) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if len(said) == lines:
                process.kill()
        code = process.wait()
    return lineage(said), code


def lineage(said: Sequence[str]) -> Lineage:
    words = (line.split() for line in said if line.startswith("trained") and line.endswith("\n"))
    return [(int(step), batch, weights) for _, step, batch, weights in words]


def everything(settings: KafkaSettings, topic: Topic) -> list[object]:
    async def read() -> list[object]:
        async with Log.open(settings) as log:
            return [decode(topic.model, record.value, tuple(record.headers)) async for record in log.read(topic)]

    return asyncio.run(read())


def balance(settings: KafkaSettings) -> Balance:
    accounts = Reconciliation()
    for row in (trace for step in range(STEPS) for batch in rollouts(step) for trace in batch):
        accounts.book(
            outcome(Disposition.CAPTURED, stage="test", session_id=row.session_id, attempt=1, units=row.units)
        )
    for item in everything(settings, OUTCOMES):
        assert isinstance(item, TokenDisposition)
        accounts.book(item)
    return accounts.balance()


def test_each_lineage_of_a_killed_trainer_is_that_of_an_undisturbed_one(
    settings: KafkaSettings, tmp_path: Path
) -> None:
    asyncio.run(cut_all(settings))
    (calm := tmp_path / "calm").mkdir()
    (harried := tmp_path / "harried").mkdir()
    undisturbed, code = run(settings, calm)
    assert code == 0
    assert [step for step, _, _ in undisturbed] == list(range(STEPS))

    stream = StreamState(run=settings.run, next_step=0, offsets={"0": 0}, world_size=1).dump()
    beginning = {"weights": "0", "trained": 0, "stream": stream}
    (harried / "checkpoint.json").write_text(json.dumps(beginning))
    rng = random.Random(5)  # noqa: S311  # the same kills in every run
    for _ in range(KILLS):
        seen, code = run(settings, harried, lines=rng.randint(2, 34))
        assert code == -9
        first = seen[0][0] if seen else 0
        assert seen == undisturbed[first : first + len(seen)]
    last, code = run(settings, harried)
    assert code == 0
    assert last == undisturbed[last[0][0] :]

    rewinds = [item for item in everything(settings, ACKS) if isinstance(item, Rewound)]
    assert rewinds, "no kill fell behind a checkpoint"
    total = balance(settings).total
    assert total.balanced
    assert total.trained + total.excluded["stale_at_hand_over"] == total.captured
    assert total.excluded["stale_at_hand_over"] > 0
