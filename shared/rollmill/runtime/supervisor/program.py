"""The programs that a supervisor runs, and the services among them."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollmill.errors import ConfigurationError

DRAIN_ORDER = ("capture", "builder", "evaluator", "reward-merger", "batcher")
"""From the source downstream: what one service still emits, the next one can still take."""


@dataclass(frozen=True)
class Program:
    """A Python module to run as a process; ``env`` is laid over the supervisor's own environment."""

    name: str
    module: str
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


def service_program(service: str, env: Mapping[str, str]) -> Program:
    """The program of one of the five services. Raises ConfigurationError for another name."""
    if service not in DRAIN_ORDER:
        raise ConfigurationError(f"unknown service {service!r}: known are {', '.join(DRAIN_ORDER)}")
    return Program(service, "rollmill_" + service.replace("-", "_"), env)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
