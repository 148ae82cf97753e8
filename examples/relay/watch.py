"""Follows a run's topics: how many records each has, and what became of the sampled tokens. It decides nothing."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from aiokafka import ConsumerRecord, TopicPartition

from rollmill.codec import decode
from rollmill.models import Disposition, TokenDisposition
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.settings import KafkaSettings
from rollmill.topics import (
    BATCHES,
    BUILT,
    COMPLETIONS,
    CUTS,
    DEAD_LETTERS,
    EVALUATIONS,
    OUTCOMES,
    POLICIES,
    TRAJECTORIES,
    Topic,
)

WATCHED: Final = (COMPLETIONS, BUILT, EVALUATIONS, TRAJECTORIES, BATCHES, CUTS, POLICIES, OUTCOMES, DEAD_LETTERS)
STALE: Final = "stale"
_POLL_MS: Final = 200
_PAUSE_SECONDS: Final = 0.2
"""A fetch for every single record would cost the broker more than the run itself."""


@dataclass
class Tally:
    """What was read so far. Records are counted one by one, because offsets have gaps."""

    records: Counter[str] = field(default_factory=Counter)
    """By topic."""
    tokens: Counter[Disposition] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)
    """Tokens by reason."""
    rewarded: set[str] = field(default_factory=set)
    """Sessions in the topic ``trajectories``."""
    stale: set[str] = field(default_factory=set)
    """Sessions excluded at a cut because they were too old."""

    @property
    def unsettled(self) -> int:
        """Captured tokens without an end; exact once everything is read."""
        disposed = (Disposition.TRAINED, Disposition.EXCLUDED, Disposition.DEAD_LETTERED)
        return self.tokens[Disposition.CAPTURED] - sum(self.tokens[disposition] for disposition in disposed)

    def count(self, outcome: TokenDisposition) -> None:
        self.tokens[outcome.disposition] += outcome.tokens
        if outcome.disposition is Disposition.EXCLUDED:
            self.excluded[outcome.reason or "unknown"] += outcome.tokens
            if outcome.reason == STALE:
                self.stale.add(outcome.session_id)


class Watcher:
    """Reads all topics of a prefix from their beginning. ``on_end`` gets each session of which tokens found an end."""

    def __init__(self, settings: KafkaSettings, on_end: Callable[[str], None]) -> None:
        self._settings = settings
        self._on_end = on_end
        self._topics = {topic.full_name(settings.prefix): topic for topic in WATCHED}
        self._moved = asyncio.Condition()
        self.tally = Tally()

    async def run(self) -> None:
        """Read until cancelled."""
        async with KafkaClients(self._settings).reading(reset="earliest") as consumer:
            consumer.assign([place for topic in WATCHED for place in self._partitions(topic)])
            while True:
                polled = await consumer.getmany(timeout_ms=_POLL_MS)
                for records in polled.values():
                    for record in records:
                        self._take(record)
                async with self._moved:
                    self._moved.notify_all()
                await asyncio.sleep(_PAUSE_SECONDS)

    async def until(self, told: Callable[[Tally], bool], seconds: float) -> bool:
        """Wait until ``told`` is true of the tally; False where it is not after ``seconds``."""
        try:
            async with asyncio.timeout(seconds), self._moved:
                await self._moved.wait_for(lambda: told(self.tally))
        except TimeoutError:
            return False
        return True

    def _partitions(self, topic: Topic) -> list[TopicPartition]:
        name = topic.full_name(self._settings.prefix)
        return [TopicPartition(name, number) for number in range(topic.partitions(self._settings))]

    def _take(self, record: ConsumerRecord[bytes, bytes]) -> None:
        topic = self._topics[record.topic]
        self.tally.records[topic.name] += 1
        if topic is TRAJECTORIES:
            self.tally.rewarded.add((record.key or b"").decode())
        if topic is OUTCOMES:
            self._end(decode(TokenDisposition, record.value, tuple(record.headers)))

    def _end(self, outcome: TokenDisposition) -> None:
        self.tally.count(outcome)
        if outcome.disposition is not Disposition.CAPTURED:
            self._on_end(outcome.session_id)
