"""`make bench-recovery`: from the start of a builder process to its first processed record, by the state it restores.

State: open sessions of 4,000 tokens with their text, after ten times as many closed ones went through. Deltas are made
by the builder's own stage for a few sessions and written under the names of all, by a producer and not through capture.
Each partition's input holds one record, the end of an open session; measured is when the first and the last of their
trajectories are committed.

``cleaned``: the changelog as compaction leaves it within 24 hours, every delta of a closed session a tombstone.
``raw``: nothing was compacted. By the topic's configuration that is true of the active segments and at most a tenth
of the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from aiokafka import AIOKafkaProducer, TopicPartition

from benchmarks.processes import Running, stopped
from benchmarks.provenance import provenance
from rollmill.codec import encode
from rollmill.models import CompletionRecord, SampledChoice, SessionClosed, SessionOpened, SessionSpec
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import BrokerConfig, running_kafka
from rollmill.runtime.stream.changelog import POSITION, Position
from rollmill.runtime.stream.processor import InputRecord
from rollmill.runtime.stream.state import ChangelogRecord, TaskState, origin_of
from rollmill.runtime.supervisor import kafka_environment
from rollmill.settings import KafkaSettings
from rollmill.strategies import builder_registry
from rollmill.topics import BUILT, COMPLETIONS, STATE_BUILDER, partition_of
from rollmill_builder.stage import BuilderStage, BuilderState

RESULTS = Path(__file__).parent / "results"
SCALES = (1000, 10_000, 50_000)
RAW_SCALES = (1000,)
CLOSED_PER_OPEN = 10
TURNS, TOKENS, SAMPLED, TEXT = 4, 4000, 0.4, 4
"""Per session: turns, tokens, share of them that is sampled, bytes of text per token."""
PATTERNS = 32
"""Sessions whose content is made; the others repeat it under their own names."""
AIM_SECONDS = 15.0
AT_MOST_SECONDS = 300.0
IN_FLIGHT = 2000
NAME = "s-%010d"


@dataclass(frozen=True)
class Pattern:
    """What one session writes to the changelog while it is open, and at its end."""

    name: bytes
    opening: list[ChangelogRecord]
    ending: list[ChangelogRecord]

    def written(self, records: list[ChangelogRecord], name: str) -> Iterator[tuple[bytes, bytes | None]]:
        """Under another name of the same length."""
        new = name.encode()
        for record in records:
            payload = record.payload
            yield (
                record.key.encode().replace(self.name, new),
                None if payload is None else payload.replace(self.name, new),
            )


def pattern(number: int) -> Pattern:
    stage = BuilderStage(registry=builder_registry(), partitions=1, late_window=3600.0)
    local = stage.task_local()
    state = TaskState[BuilderState].of(stage, local)
    name = NAME % number
    events = [_opened(name), *_calls(name, number), _closed(name)]
    written: list[list[ChangelogRecord]] = []
    for offset, event in enumerate(events):
        record = InputRecord(COMPLETIONS, 0, offset, name.encode(), encode(event))
        written.append(state.stage(stage.process(state, record, local), origin_of(0, 0, offset)))
        state.commit()
        local.committed(state)
    ending = [record for record in written[-1] if name in record.key]
    return Pattern(name.encode(), [record for records in written[:-1] for record in records], ending)


def _opened(name: str) -> SessionOpened:
    return SessionOpened(session_id=name, spec=SessionSpec(group_id="group"), at=time.time())


def _closed(name: str) -> SessionClosed:
    return SessionClosed(session_id=name, at=time.time())


def _calls(name: str, seed: int) -> Iterator[CompletionRecord]:
    random = np.random.default_rng(seed)
    share, sampled = TOKENS // TURNS, int(TOKENS // TURNS * SAMPLED)
    ids = random.integers(10, 150_000, TOKENS, dtype=np.int32)
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        end = (turn + 1) * share
        messages.append({"role": "user", "content": _text(random, share - sampled)})
        message = {"role": "assistant", "content": _text(random, sampled)}
        logprobs = -random.exponential(1.0, sampled).astype(np.float32)
        yield CompletionRecord(
            session_id=name,
            completion_id=f"{name}-{turn}",
            started_at=time.time(),
            ended_at=time.time(),
            model="policy",
            usage_completion_tokens=sampled,
            prompt_ids=ids[: end - sampled],
            choices=(
                SampledChoice(
                    token_ids=ids[end - sampled : end], logprobs=logprobs, finish_reason="stop", message=message
                ),
            ),
            request={"model": "policy", "messages": list(messages)},
        )
        messages.append(message)


def _text(random: np.random.Generator, tokens: int) -> str:
    return random.integers(97, 123, tokens * TEXT, dtype=np.uint8).tobytes().decode()


class Preparation:
    """Writes the changelog and the input of ``count`` open sessions."""

    def __init__(self, settings: KafkaSettings, count: int, *, raw: bool) -> None:
        self._settings, self._count, self._raw = settings, count, raw
        self._patterns = [pattern(number) for number in range(PATTERNS)]
        self._pending: list[asyncio.Future[Any]] = []
        self.bytes = self.records = 0

    async def run(self) -> None:
        await apply_topics(self._settings)
        async with KafkaClients(self._settings).producer(linger_ms=20) as producer:
            for number in range(self._count):
                for other in range(CLOSED_PER_OPEN):
                    await self._session(producer, self._count + number * CLOSED_PER_OPEN + other, is_open=False)
                await self._session(producer, number, is_open=True)
            await self._position(producer)
            await self._input(producer)
            await self._acknowledged(0)

    async def _session(self, producer: AIOKafkaProducer, number: int, *, is_open: bool) -> None:
        name, made = NAME % number, self._patterns[number % PATTERNS]
        partition = partition_of(name.encode(), self._settings.partitions)
        if is_open or self._raw:
            for key, value in made.written(made.opening, name):
                await self._send(producer, partition, key, value)
        if not is_open:
            for key, value in made.written(made.ending, name):
                await self._send(producer, partition, key, value)

    async def _position(self, producer: AIOKafkaProducer) -> None:
        for partition in range(self._settings.partitions):
            position = Position({f"{COMPLETIONS.name}/{partition}": 0})
            await self._send(producer, partition, POSITION.encode(), position.encode())

    async def _input(self, producer: AIOKafkaProducer) -> None:
        """For each partition the end of a session that is open in it."""
        left = set(range(self._settings.partitions))
        for number in range(self._count):
            name = NAME % number
            partition = partition_of(name.encode(), self._settings.partitions)
            if partition in left:
                left.remove(partition)
                topic = COMPLETIONS.full_name(self._settings.prefix)
                await producer.send_and_wait(topic, encode(_closed(name)), name.encode(), partition=partition)

    async def _send(self, producer: AIOKafkaProducer, partition: int, key: bytes, value: bytes | None) -> None:
        topic = STATE_BUILDER.full_name(self._settings.prefix)
        self._pending.append(await producer.send(topic, value, key, partition=partition))
        self.bytes += len(key) + len(value or b"")
        self.records += 1
        if len(self._pending) > IN_FLIGHT:
            await self._acknowledged(IN_FLIGHT // 2)

    async def _acknowledged(self, left: int) -> None:
        done, self._pending = self._pending[: len(self._pending) - left], self._pending[len(self._pending) - left :]
        await asyncio.gather(*done)


async def recovery(settings: KafkaSettings) -> dict[str, float]:
    """Seconds from the start of a builder process to the first and the last task's first processed record."""
    places = [TopicPartition(BUILT.full_name(settings.prefix), number) for number in range(settings.partitions)]
    async with KafkaClients(settings).reading(reset="earliest") as consumer:
        consumer.assign(places)
        began = time.monotonic()
        environment = {**os.environ, **kafka_environment(settings), "ROLLMILL_HEALTH_PORT": "0"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollmill_builder", env=environment, stderr=DEVNULL
        )
        async with stopped(process), asyncio.timeout(AT_MOST_SECONDS):
            seen: list[float] = []
            while len(seen) < settings.partitions:
                for records in (await consumer.getmany(timeout_ms=20)).values():
                    seen += [time.monotonic() - began] * len(records)
            cpu, resident = Running(process.pid, 0).cpu_seconds, _resident(process.pid)
    return {
        "first_s": round(seen[0], 2),
        "last_s": round(seen[-1], 2),
        "cpu_s": round(cpu, 2),
        "resident_mib": resident,
    }


def _resident(pid: int) -> float:
    fields = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(field.split()[1]) // 1024 for field in fields if field.startswith("VmRSS"))


async def measure(scales: list[int], raw_scales: list[int]) -> list[dict[str, Any]]:
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="rollmill-bench-") as directory,
        running_kafka(Path(directory), BrokerConfig(heap_mb=1024)) as kafka,
    ):
        for count, raw in [*((count, False) for count in scales), *((count, True) for count in raw_scales)]:
            prefix = f"bench{count}{'raw' if raw else ''}."
            settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, prefix=prefix)
            prepared = Preparation(settings, count, raw=raw)
            began = time.monotonic()
            await prepared.run()
            seconds = round(time.monotonic() - began, 1)
            found.append(
                {
                    "open": count,
                    "closed": count * CLOSED_PER_OPEN,
                    "changelog": "raw" if raw else "cleaned",
                    "changelog_records": prepared.records,
                    "changelog_mib": round(prepared.bytes / 2**20),
                    **await recovery(settings),
                    "prepared_s": seconds,
                }
            )
            print(json.dumps(found[-1]), file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-recovery", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON at the end")
    parser.add_argument("--save", action="store_true", help="keep the results in benchmarks/results")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--scales", type=int, nargs="*", default=SCALES, help="open sessions, cleaned changelog")
    parser.add_argument("--raw-scales", type=int, nargs="*", default=RAW_SCALES, help="the same, nothing compacted")
    options = parser.parse_args()
    results = {
        "session": {"turns": TURNS, "tokens": TOKENS, "sampled": SAMPLED, "text_bytes_per_token": TEXT},
        "aim_s_for_10k": AIM_SECONDS,
        "runs": asyncio.run(measure(list(options.scales), list(options.raw_scales))),
    }
    document = {**provenance(), "note": options.note, "results": results}
    print(json.dumps(results, indent=2))
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "recovery.json").write_text(json.dumps(document, indent=2) + "\n")
    if options.json:
        print(json.dumps({**document, **results}))


if __name__ == "__main__":
    main()
