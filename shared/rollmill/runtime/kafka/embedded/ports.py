"""Ports of the broker: free ones the first time, the same ones at every later start, so that clients find it again."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt

from rollmill.errors import ConfigurationError

LOWEST, HIGHEST = 20_000, 32_000
"""Below the range from which systems number outgoing connections: while the broker is down, a client that keeps
connecting to a port of that range can be given that very port as its own, and the broker cannot bind it again."""
ATTEMPTS = 200


class Ports(BaseModel):
    """Where clients and the controller's peers connect, on loopback."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    broker: PositiveInt
    controller: PositiveInt


def choose_ports(path: Path, wanted: int | None) -> Ports:
    """Ports for this start, remembered in ``path``.

    ``wanted`` is the requested client port, or None; ConfigurationError where that one is taken.
    """
    before = Ports.model_validate_json(path.read_bytes()) if path.exists() else None
    broker = _requested(wanted) if wanted is not None else _kept_or_free(before.broker if before else None)
    controller = _kept_or_free(before.controller if before else None, besides=broker)
    ports = Ports(broker=broker, controller=controller)
    path.write_text(ports.model_dump_json() + "\n")
    return ports


def _requested(port: int) -> int:
    if not is_free(port):
        raise ConfigurationError(f"Port {port} on 127.0.0.1 is taken; choose another one, or none for a free one.")
    return port


def _kept_or_free(port: int | None, *, besides: int | None = None) -> int:
    if port is not None and port != besides and is_free(port):
        return port
    return free_port(besides=besides)


def free_port(*, besides: int | None = None) -> int:
    """A port of loopback that is free now. Raises ConfigurationError where none is found."""
    candidates = (LOWEST + secrets.randbelow(HIGHEST - LOWEST) for _ in range(ATTEMPTS))
    for candidate in candidates:
        if candidate != besides and is_free(candidate):
            return candidate
    raise ConfigurationError(f"No free port between {LOWEST} and {HIGHEST} on 127.0.0.1.")


def is_free(port: int) -> bool:
    """Whether a server could listen on ``port`` of loopback now; bound as Java does, past connections ignored."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
