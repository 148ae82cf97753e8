"""What a task needs from its process."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollmill.runtime.failpoints import Failpoints
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.telemetry.clock import Clock
from rollmill.runtime.telemetry.health import Health
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.settings import ServiceSettings


@dataclass(frozen=True)
class TaskTools:
    """Shared by all tasks of a process."""

    settings: ServiceSettings
    clients: KafkaClients
    clock: Clock
    metrics: Metrics
    health: Health
    failpoints: Failpoints = field(default_factory=Failpoints)
