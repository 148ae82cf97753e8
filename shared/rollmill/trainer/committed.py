"""The position that a rank has committed, with the state in the commit's metadata."""

from __future__ import annotations

import orjson
from aiokafka import TopicPartition

from rollmill.errors import ConfigurationError
from rollmill.kafka.clients import KafkaClients
from rollmill.kafka.transaction import Offset
from rollmill.models import dump_json
from rollmill.trainer.state import StreamState


def offsets_of(state: StreamState, partition: TopicPartition) -> dict[TopicPartition, Offset]:
    """What to commit for a state; the metadata is some hundred bytes of 4 KiB."""
    return {partition: (state.offsets[str(partition.partition)], dump_json(state.dump()).decode())}


async def read_committed(clients: KafkaClients, group_id: str, partition: TopicPartition) -> StreamState | None:
    """The state committed last; None where the group has committed nothing. A consumer drops the metadata."""
    admin = clients.admin()
    try:
        await admin.start()
        found = await admin.list_consumer_group_offsets(group_id, partitions=[partition])
    finally:
        await admin.close()
    committed = found.get(partition)
    if committed is None or committed.offset < 0:
        return None
    return _parse(committed.metadata, group_id)


def _parse(metadata: str, group_id: str) -> StreamState:
    try:
        return StreamState.read(orjson.loads(metadata))
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"group {group_id} was committed by something else: {metadata!r}") from error
