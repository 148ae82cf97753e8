"""All five services on one cluster, as `rollmill up`, the demo and the end-to-end tests run them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.supervisor.restart_policy import RestartPolicy
from rollmill.runtime.supervisor.supervisor import DEFAULT_POLICY, DRAIN_ORDER, Supervisor, service_program
from rollmill.settings import KafkaSettings

NO_PORTS: Mapping[str, int] = MappingProxyType({})


@asynccontextmanager
async def running_services(
    settings: KafkaSettings,
    log_directory: Path,
    *,
    environment: Mapping[str, str],
    report: Callable[[str], None],
    policy: RestartPolicy = DEFAULT_POLICY,
    health_ports: Mapping[str, int] = NO_PORTS,
) -> AsyncIterator[Supervisor]:
    """Create the topics, start the services, and yield once all are ready; drained in order at the end.

    ``environment`` is what the services get (``PATH``, ``ROLLMILL_*``); cluster, prefix and counts of ``settings``
    are laid over it. ``health_ports``: by service, else free ones.

    Raises ConfigurationError where the topics differ, FatalError where a service gives up.
    """
    await apply_topics(settings)
    async with Supervisor(log_directory, environment=environment, report=report, policy=policy) as supervisor:
        for service in DRAIN_ORDER:
            program = service_program(service, kafka_environment(settings))
            await supervisor.start(replace(program, health_port=health_ports.get(service)))
        await supervisor.wait_ready()
        yield supervisor


def kafka_environment(settings: KafkaSettings) -> dict[str, str]:
    """The environment variables by which a service gets the same Kafka settings; structured ones as JSON."""
    values = settings.model_dump(mode="json")
    return {
        f"ROLLMILL_{name.upper()}": json.dumps(value) if isinstance(value, dict | list) else str(value)
        for name, value in values.items()
    }
