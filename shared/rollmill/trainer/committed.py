"""The position that a rank has committed, with the state in the commit's metadata."""

from __future__ import annotations

import orjson
from aiokafka import TopicPartition

from rollmill.errors import ConfigurationError
from rollmill.kafka.clients import KafkaClients
from rollmill.kafka.transaction import Offset
from rollmill.models import dump_json
from rollmill.trainer.state import StreamState


def offsets_of(state: StreamState, topic: str) -> dict[TopicPartition, Offset]:
    """What to commit for a state; the metadata is some hundred bytes of 4 KiB."""
    metadata = dump_json(state.dump()).decode()
    return {TopicPartition(topic, int(number)): (offset, metadata) for number, offset in state.offsets.items()}


async def read_committed(clients: KafkaClients, group_id: str, topic: str) -> StreamState | None:
    """The state committed last; None where the group has committed nothing. A consumer drops the metadata.

    Where partitions of a former world size are left behind, the state that has come furthest is it.
    """
    admin = clients.admin()
    try:
        await admin.start()
        found = await admin.list_consumer_group_offsets(group_id)
    finally:
        await admin.close()
    committed = [each for place, each in found.items() if place.topic == topic and each.offset >= 0]
    states = [_parse(each.metadata, group_id) for each in committed]
    return max(states, key=lambda state: state.next_step, default=None)


def _parse(metadata: str, group_id: str) -> StreamState:
    try:
        return StreamState.read(orjson.loads(metadata))
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"group {group_id} was committed by something else: {metadata!r}") from error
