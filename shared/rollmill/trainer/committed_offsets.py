"""What a consumer group has committed, with the metadata of the commit."""

from __future__ import annotations

from rollmill.runtime.kafka.clients import KafkaClients


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
