"""Who consumes a run's trajectories for the record (rule A9): the batcher, a trainer that reads them, or none."""

from __future__ import annotations

import structlog

from rollmill.errors import ConfigurationError
from rollmill.runtime.app import ServiceContext
from rollmill.topics import TRAJECTORIES

log = structlog.get_logger(__name__)


async def idle(context: ServiceContext) -> None:
    """Makes no batches, logs why, and waits for the end."""
    log.warning("no batches are made", hand_over=context.settings.hand_over, prefix=context.settings.prefix)
    await context.stop.wait()


async def no_other_consumer(context: ServiceContext) -> None:
    """Raises ConfigurationError where a `TrajectoryStream` has committed offsets of the trajectories."""
    settings = context.settings
    topic = TRAJECTORIES.full_name(settings.prefix)
    admin = context.clients.admin()
    try:
        await admin.start()
        for rank in range(TRAJECTORIES.partitions(settings)):
            group = f"{settings.prefix}trainer.{rank}"
            if any(partition.topic == topic for partition in await admin.list_consumer_group_offsets(group)):
                raise ConfigurationError(
                    f"a trainer takes the trajectories of prefix {settings.prefix!r} itself (group {group}): run the "
                    "batcher with ROLLMILL_HAND_OVER=trajectories, as the trainer, or use another prefix"
                )
    finally:
        await admin.close()
