"""The position that a rank has committed, with the state in the commit's metadata."""

from __future__ import annotations

import orjson
from aiokafka import TopicPartition

from rollmill.errors import ConfigurationError
from rollmill.models import dump_json
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.transaction import Offset
from rollmill.trainer.batches.state import StreamState


def offsets_of(state: StreamState, topic: str) -> dict[TopicPartition, Offset]:
    """What to commit for a state; the metadata is some hundred bytes of 4 KiB."""
    metadata = dump_json(state.dump()).decode()
    return {TopicPartition(topic, int(number)): (offset, metadata) for number, offset in state.offsets.items()}


async def read_committed(clients: KafkaClients, group_id: str, topic: str) -> StreamState | None:
    """The state committed last; None where the group has committed nothing.

    Where partitions of a former world size are left, the state that is furthest ahead counts.
    """
    found = await list_committed(clients, group_id, topic)
    states = [_parse(metadata, group_id) for _, metadata in found.values()]
    return max(states, key=lambda state: (state.placement, state.next_step), default=None)


async def list_committed(clients: KafkaClients, group_id: str, topic: str) -> dict[int, tuple[int, str]]:
    """Offset and metadata by partition. A consumer's API would drop the metadata."""
    admin = clients.admin()
    try:
        await admin.start()
        found = await admin.list_consumer_group_offsets(group_id)
    finally:
        await admin.close()
    return {
        partition.partition: (committed.offset, committed.metadata)
        for partition, committed in found.items()
        if partition.topic == topic and committed.offset >= 0
    }


def _parse(metadata: str, group_id: str) -> StreamState:
    try:
        return StreamState.read(orjson.loads(metadata))
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"group {group_id} was committed by another program: {metadata!r}") from error
