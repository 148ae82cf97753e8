"""What is checked before `rollmill up` starts anything: settings, ports, the data directory, another run that lives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rollmill.codec import decode
from rollmill.errors import ConfigurationError, PoisonRecordError
from rollmill.models import ReplicaHeartbeat
from rollmill.models.session import ALIVE_SECONDS, replica_key
from rollmill.runtime.kafka.embedded.ports import is_free
from rollmill.runtime.kafka.log_reader import Log
from rollmill.settings import KafkaSettings
from rollmill.settings.loading import mistakes_of
from rollmill.settings.programs import program_settings
from rollmill.topics import SESSIONS

LOOK_SECONDS = 1.0


def check_settings() -> None:
    """Of all services, as they will read them. Raises ConfigurationError with every mistake."""
    lines = dict.fromkeys(line for kind in program_settings().values() for line in mistakes_of(kind))
    if lines:
        raise ConfigurationError("; ".join(lines))


def check_upstream(url: str) -> None:
    """Raises ConfigurationError where ``url`` is no address of a server."""
    found = urlsplit(url)
    if found.scheme not in ("http", "https") or not found.hostname:
        raise ConfigurationError(
            f"--upstream {url} is no URL: it begins with http:// or https://, such as http://{url}"
        )


def check_ports(ports: Mapping[str, int]) -> None:
    """Ports by the option that sets them. Raises ConfigurationError where one is taken, or given twice."""
    for option, port in ports.items():
        if not is_free(port):
            raise ConfigurationError(f"port {port} on 127.0.0.1 is taken: choose another one with {option}")
    if len(set(ports.values())) < len(ports):
        raise ConfigurationError(
            f"two options have one port: {', '.join(f'{name} {port}' for name, port in ports.items())}"
        )


def prepare_directory(path: Path) -> None:
    """Raises ConfigurationError where it cannot be made, or not written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(f"--data-dir {path} cannot be used: {error.strerror}") from error


async def refuse_another_run(settings: KafkaSettings) -> None:
    """Raises ConfigurationError where services of another process serve this prefix.

    Their capture writes signs of life; one that was killed is silent, which takes up to `ALIVE_SECONDS` to see.
    """
    async with Log.open(settings) as log:
        before = await _heartbeats(log)
        until = max(before.values(), default=0.0) + ALIVE_SECONDS
        while time.time() < until:
            await asyncio.sleep(LOOK_SECONDS)
            now = await _heartbeats(log)
            if any(at > before.get(replica, 0.0) for replica, at in now.items()):
                raise ConfigurationError(
                    f"services of another process serve the prefix {settings.prefix!r} on "
                    f"{settings.bootstrap_servers}: stop them, or choose another prefix with --prefix"
                )
            if not now:
                return


async def _heartbeats(log: Log) -> dict[str, float]:
    """Time of the last sign of life of each replica of capture."""
    found: dict[str, float] = {}
    beginning = replica_key("").encode()
    async for record in log.read(SESSIONS):
        key = record.key or b""
        if not key.startswith(beginning):
            continue
        found.pop(key.decode(), None)
        try:
            heartbeat: ReplicaHeartbeat = decode(ReplicaHeartbeat, record.value, tuple(record.headers))
        except PoisonRecordError:
            continue  # a tombstone: it has ended
        found[key.decode()] = heartbeat.at
    return found
