"""The registry of topics: names, sizes, co-partitioning, the partitioner."""

from __future__ import annotations

import pytest

from rollmill.settings import KafkaSettings
from rollmill.topics import (
    BUILT,
    COMPLETIONS,
    DEAD_LETTERS,
    EVALUATIONS,
    REGISTRY,
    STATE_BATCHER,
    STATE_BUILDER,
    TRAJECTORIES,
    partition_of,
)


def test_names_are_unique_and_prefixed() -> None:
    names = [topic.full_name("run7.") for topic in REGISTRY]
    assert len(set(names)) == len(names)
    assert all(name.startswith("run7.") for name in names)


def test_what_is_joined_by_session_is_co_partitioned() -> None:
    settings = KafkaSettings(partitions=4)
    counts = {topic.partitions(settings) for topic in (COMPLETIONS, BUILT, EVALUATIONS, TRAJECTORIES, STATE_BUILDER)}
    assert counts == {4}
    assert STATE_BATCHER.partitions(settings) == 1


def test_a_dead_letter_has_room_for_the_largest_record() -> None:
    assert max(topic.max_bytes for topic in REGISTRY if topic is not DEAD_LETTERS) < DEAD_LETTERS.max_bytes
    assert all(int(topic.broker_config()["max.message.bytes"]) > topic.max_bytes for topic in REGISTRY)


def test_changelogs_are_compacted_so_that_a_restore_reads_no_dead_week() -> None:
    config = STATE_BUILDER.broker_config()
    assert config["cleanup.policy"] == "compact"
    assert int(config["segment.ms"]) == 600_000
    assert int(config["max.compaction.lag.ms"]) == 1_800_000


@pytest.mark.parametrize(
    ("key", "expected"),
    # Values of org.apache.kafka.common.utils.Utils.murmur2 in Kafka's own unit test.
    [(b"21", -973932308), (b"foobar", -790332482), (b"a-little-bit-long-string", -985981536)],
)
def test_keys_go_where_the_java_client_sends_them(key: bytes, expected: int) -> None:
    assert partition_of(key, 12) == (expected & 0x7FFFFFFF) % 12


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(ValueError, match="session id"):
        partition_of(b"", 4)


@pytest.mark.parametrize("prefix", ["no-dot", "ümlaut.", "a b."])
def test_a_prefix_ends_with_a_dot_and_is_legal_in_topic_names(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        KafkaSettings(prefix=prefix)
