"""The registry of topics: name, key, model, format, retention, sizes, who writes and who reads.

The README's table, ``schemas/topics.yaml`` and ``rollmill topics`` are generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiokafka.partitioner import murmur2

from rollmill.codec import JSON, MSGPACK, SAFETENSORS
from rollmill.models import (
    BatchHeader,
    CompletionEvent,
    Cut,
    Evaluation,
    PolicyAnnouncement,
    RefillRequest,
    SessionRecord,
    TokenDisposition,
    TrainerEvent,
    Trajectory,
)
from rollmill.settings import KafkaSettings

MIB = 2**20
DAY_MS = 24 * 3600 * 1000


class Partitioning(StrEnum):
    """``shared``: co-partitioned by session id; ``ranks``: one per data-parallel rank; ``single``: one."""

    SHARED = "shared"
    RANKS = "ranks"
    SINGLE = "single"


@dataclass(frozen=True)
class Topic:
    """One topic, by its name without the prefix."""

    name: str
    key: str
    model: Any
    """The pydantic model (or annotated union) of the value; None for raw bytes."""
    schema: str
    """Name of the schema in ``schemas/``."""
    format: str
    partitioning: Partitioning
    max_bytes: int
    """Of one record, measured before compression (rule C1)."""
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    meaning: str
    config: dict[str, str] = field(default_factory=dict, hash=False)

    def full_name(self, prefix: str) -> str:
        return prefix + self.name

    def partitions(self, settings: KafkaSettings) -> int:
        counts = {Partitioning.SHARED: settings.partitions, Partitioning.RANKS: settings.batch_partitions}
        return counts.get(self.partitioning, 1)

    def broker_config(self) -> dict[str, str]:
        """Topic-level configuration; the broker's limit leaves room for key, headers and framing."""
        return {"max.message.bytes": str(self.max_bytes + MIB // 2), "cleanup.policy": "delete", **self.config}


KEEP_FOR_EVER = {"retention.ms": "-1"}
WEEK = {"retention.ms": str(7 * DAY_MS)}
COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": str(64 * MIB),
    "segment.ms": "600000",
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "1800000",
    "delete.retention.ms": str(DAY_MS),
}

COMPLETIONS = Topic(
    "completions",
    "session id",
    CompletionEvent,
    "completion_event",
    MSGPACK,
    Partitioning.SHARED,
    8 * MIB,
    ("capture", "builder", "any client"),
    ("builder",),
    "session opened, completion recorded, session closed or expired",
    WEEK,
)
SESSIONS = Topic(
    "sessions",
    "session id",
    SessionRecord,
    "session_record",
    JSON,
    Partitioning.SHARED,
    MIB,
    ("capture",),
    ("capture",),
    "spec and status of each session, pauses of policies, and signs of life, for every capture replica",
    COMPACTED,
)
BUILT = Topic(
    "built",
    "session id",
    Trajectory,
    "trajectory",
    MSGPACK,
    Partitioning.SHARED,
    8 * MIB,
    ("builder",),
    ("evaluator", "reward-merger"),
    "trajectories without reward",
    WEEK,
)
EVALUATIONS = Topic(
    "evaluations",
    "session id",
    Evaluation,
    "evaluation",
    JSON,
    Partitioning.SHARED,
    MIB,
    ("evaluator", "reward-merger", "capture", "any grader"),
    ("reward-merger",),
    "grades, also late and revised ones",
    WEEK,
)
TRAJECTORIES = Topic(
    "trajectories",
    "session id",
    Trajectory,
    "trajectory",
    MSGPACK,
    Partitioning.SHARED,
    8 * MIB,
    ("reward-merger",),
    ("batcher", "any reader"),
    "rewarded trajectories",
    WEEK,
)
BATCHES = Topic(
    "batches",
    "step",
    BatchHeader,
    "batch_header",
    SAFETENSORS,
    Partitioning.RANKS,
    8 * MIB,
    ("batcher",),
    ("trainer",),
    "micro-batches, packed; one partition per data-parallel rank",
    WEEK,
)
CUTS = Topic(
    "cuts",
    "step",
    Cut,
    "cut",
    JSON,
    Partitioning.SINGLE,
    MIB,
    ("batcher",),
    ("replay", "ledger"),
    "every decision of the batcher",
    KEEP_FOR_EVER,
)
REFILLS = Topic(
    "refills",
    "group id",
    RefillRequest,
    "refill_request",
    JSON,
    Partitioning.SINGLE,
    MIB,
    ("batcher",),
    ("whoever drives rollouts",),
    "groups that made no step, and why: rollouts wanted in their place",
    WEEK,
)
POLICIES = Topic(
    "policies",
    "policy name",
    PolicyAnnouncement,
    "policy_announcement",
    JSON,
    Partitioning.SINGLE,
    MIB,
    ("trainer",),
    ("capture", "batcher"),
    "announced policy versions",
    KEEP_FOR_EVER,
)
ACKS = Topic(
    "acks",
    "rank",
    TrainerEvent,
    "trainer_event",
    JSON,
    Partitioning.SINGLE,
    MIB,
    ("trainer", "batcher", "rollmill batches return"),
    ("batcher", "trainer", "ledger"),
    "steps acknowledged, rewinds, end of stream, steps returned and laid out anew",
    KEEP_FOR_EVER,
)
OUTCOMES = Topic(
    "outcomes",
    "session id",
    TokenDisposition,
    "outcome",
    JSON,
    Partitioning.SHARED,
    MIB,
    ("every stage", "trainer"),
    ("ledger",),
    "captured tokens and their final disposition",
    KEEP_FOR_EVER,
)
DEAD_LETTERS = Topic(
    "dead-letters",
    "original key",
    None,
    "dead_letter_info",
    "as received",
    Partitioning.SHARED,
    9 * MIB,
    ("every stage",),
    ("a person",),
    "the bytes as received, with reason, source position and error in headers",
    KEEP_FOR_EVER,
)


def changelog(stage: str, partitioning: Partitioning) -> Topic:
    """The compacted changelog of a stateful stage."""
    return Topic(
        f"state.{stage}",
        "state key",
        None,
        "",
        MSGPACK,
        partitioning,
        8 * MIB,
        (stage,),
        (stage, "ledger"),
        f"updates of the {stage}'s state",
        COMPACTED,
    )


STATE_BUILDER = changelog("builder", Partitioning.SHARED)
STATE_REWARD_MERGER = changelog("reward-merger", Partitioning.SHARED)
STATE_BATCHER = changelog("batcher", Partitioning.SINGLE)

REGISTRY: tuple[Topic, ...] = (
    COMPLETIONS,
    SESSIONS,
    BUILT,
    EVALUATIONS,
    TRAJECTORIES,
    BATCHES,
    CUTS,
    REFILLS,
    POLICIES,
    ACKS,
    OUTCOMES,
    DEAD_LETTERS,
    STATE_BUILDER,
    STATE_REWARD_MERGER,
    STATE_BATCHER,
)

CLAIM_CHECKED: tuple[Topic, ...] = (
    COMPLETIONS,
    BUILT,
    TRAJECTORIES,
    STATE_BUILDER,
    STATE_REWARD_MERGER,
    STATE_BATCHER,
)
"""Their large values may be stored in object storage. Micro-batches are bounded by design, the others are small."""


def partition_of(key: bytes, partitions: int) -> int:
    """Partition of a key as Kafka's Java client and aiokafka choose it (murmur2). An empty key is refused."""
    if not key:
        raise ValueError("a record without a key has no partition of its own; use the session id as key")
    return int((murmur2(key) & 0x7FFFFFFF) % partitions)
