"""One consumer of record per run (rule A9): the batcher, a trainer that reads trajectories itself, or nobody."""

from __future__ import annotations

import structlog

from rollmill.errors import ConfigurationError
from rollmill.runtime.app import ServiceContext
from rollmill.topics import TRAJECTORIES

log = structlog.get_logger(__name__)


async def idle(context: ServiceContext) -> None:
    """Batches nothing, and says why."""
    log.warning("no batches are made", hand_over=context.settings.hand_over, prefix=context.settings.prefix)
    await context.stop.wait()


async def no_other_consumer(context: ServiceContext) -> None:
    """Raises ConfigurationError where a `TrajectoryStream` has taken the trajectories for the record."""
    settings = context.settings
    name = TRAJECTORIES.full_name(settings.prefix)
    admin = context.clients.admin()
    try:
        await admin.start()
        for rank in range(TRAJECTORIES.partitions(settings)):
            group = f"{settings.prefix}trainer.{rank}"
            if any(place.topic == name for place in await admin.list_consumer_group_offsets(group)):
                raise ConfigurationError(
                    f"a trainer takes the trajectories of prefix {settings.prefix!r} itself (group {group}): run the "
                    "batcher with ROLLMILL_HAND_OVER=trajectories, as the trainer, or use another prefix"
                )
    finally:
        await admin.close()
