"""Pytest fixtures: one Apache Kafka for the whole test run, and a topic prefix for each test.

Use with ``pytest_plugins = ["rollmill.testing.kafka"]`` in the top ``conftest.py``. One broker with a prefix per test
is far cheaper than a broker per test, and no test reads the topics of another.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmill.runtime.kafka.embedded import BrokerConfig, EmbeddedKafka, running_kafka


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[EmbeddedKafka]:
    """Apache Kafka, ready, in test mode, for all tests; stopped, and its data deleted, after the last."""
    # Not pytest's own temporary folder: that keeps three runs, and a broker's data is large.
    with (
        tempfile.TemporaryDirectory(prefix="rollmill-kafka-") as directory,
        running_kafka(Path(directory), BrokerConfig(test_mode=True)) as kafka,
    ):
        yield kafka


@pytest.fixture
def topic_prefix() -> str:
    """Prefix of every topic, group and transactional id of this test, and of no other."""
    return f"t{uuid.uuid4().hex[:8]}."
