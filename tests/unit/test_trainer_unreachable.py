"""Without a broker: loud, bounded, nothing left behind."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from rollmill.errors import ConfigurationError, FatalError
from rollmill.settings import KafkaSettings
from rollmill.trainer import BatchStream, PolicyPublisher, TrajectoryStream


@pytest.fixture
def nowhere() -> Iterator[KafkaSettings]:
    """An address that is taken and answers nobody."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield KafkaSettings(bootstrap_servers=f"127.0.0.1:{taken.getsockname()[1]}", kafka_seconds=0.1)


def test_b11_a_stream_without_kafka_waits_and_says_what_to_do_in_one_line(
    nowhere: KafkaSettings, caplog: pytest.LogCaptureFixture
) -> None:
    advice = rf"^Kafka does not answer at {nowhere.bootstrap_servers}; start it with `rollmill up`, or set \S+$"
    with BatchStream(settings=nowhere) as stream, pytest.raises(ConfigurationError, match=advice) as caught:
        stream.state_dict()
    assert caught.value.__cause__ is None
    assert [record.getMessage().partition(" yet; ")[2] for record in caplog.records] == ["trying for 0.1 s"]


def test_b11_a_publisher_without_kafka_says_the_same(nowhere: KafkaSettings) -> None:
    with PolicyPublisher(settings=nowhere) as publisher, pytest.raises(ConfigurationError, match="rollmill up"):
        publisher.update(1)


def test_a_stream_that_was_never_used_touches_no_broker(nowhere: KafkaSettings) -> None:
    stream = BatchStream(settings=nowhere)
    stream.stop()
    stream.close()
    with pytest.raises(FatalError):
        stream.state_dict()


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 1), (0, 9)])
def test_a_rank_that_cannot_be_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigurationError, match="ranks count from 0"):
        BatchStream(rank, world_size, settings=KafkaSettings(batch_partitions=8))


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({}, "run None"),
        ({"run": "run"}, "no state of a trajectory stream"),
        ({"run": "run", "places": [1]}, "no state of a trajectory stream"),
        ({"run": "run", "places": {"zero": {}}}, "no state of a trajectory stream"),
        ({"run": "run", "places": {"0": {"next": 1}}}, "no state of a trajectory stream"),
        ({"run": "run", "places": {"0": {}}}, "another rank or number of ranks"),
    ],
)
def test_a_state_of_something_else_is_refused_before_anything_moves(
    nowhere: KafkaSettings, state: dict[str, Any], complaint: str
) -> None:
    settings = nowhere.model_copy(update={"hand_over": "trajectories", "partitions": 2})
    with TrajectoryStream(settings=settings) as stream, pytest.raises(ConfigurationError, match=complaint):
        stream.load_state_dict(state)
