"""The data directory of a broker: its layout, its lock, and its one formatting."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import os
import subprocess
import uuid
from pathlib import Path
from typing import NamedTuple

from rollmill.errors import ConfigurationError, FatalError
from rollmill.runtime.kafka.embedded.config import BrokerConfig, log4j_properties
from rollmill.runtime.kafka.embedded.listeners import User, scram_arguments
from rollmill.runtime.kafka.embedded.ports import Ports

LOCK_POLL_SECONDS = 0.05


class DataDirectory(NamedTuple):
    """Everything that one broker keeps, under ``root``."""

    root: Path

    @property
    def logs(self) -> Path:
        """Kafka's storage."""
        return self.root / "data"

    @property
    def ports(self) -> Path:
        return self.root / "ports.json"

    @property
    def server_properties(self) -> Path:
        return self.root / "server.properties"

    @property
    def log4j_properties(self) -> Path:
        return self.root / "log4j2.properties"

    @property
    def broker_log(self) -> Path:
        return self.root / "broker.log"

    @property
    def console(self) -> Path:
        """What the Java machine itself prints: out of memory, unusable options."""
        return self.root / "console.log"

    @property
    def holder(self) -> Path:
        """Locked by the process of the broker for as long as it runs; contains the number of its process group."""
        return self.root / "broker.lock"

    @property
    def is_formatted(self) -> bool:
        return (self.logs / "meta.properties").exists()

    def write_configuration(self, config: BrokerConfig, ports: Ports) -> None:
        text = config.server_properties(log_dir=self.logs, broker_port=ports.broker, controller_port=ports.controller)
        self.server_properties.touch(mode=0o600)
        self.server_properties.write_text(text)
        self.log4j_properties.write_text(log4j_properties(self.broker_log))

    def log_tail(self, lines: int = 15) -> str:
        """End of the broker's own account, for an error message."""
        texts = [path.read_text(errors="replace") for path in (self.console, self.broker_log) if path.exists()]
        return "\n".join("\n".join(texts).splitlines()[-lines:])


async def hold(directory: DataDirectory, patience: float) -> int:
    """Lock the directory and return the open file, to be handed to the broker, which keeps it locked.

    Raises ConfigurationError when another broker holds it for longer than ``patience`` seconds.
    """
    directory.root.mkdir(parents=True, exist_ok=True)
    file = os.open(directory.holder, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        async with asyncio.timeout(patience):
            while not _lock(file):  # noqa: ASYNC110 - the end of another process is no event of this loop
                await asyncio.sleep(LOCK_POLL_SECONDS)
    except TimeoutError:
        os.close(file)
        raise ConfigurationError(_in_use(directory)) from None
    return file


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_use(directory: DataDirectory) -> str:
    owner = directory.holder.read_text().strip() or "of a start under way"
    return (
        f"{directory.root} is in use by a running broker (process {owner}). Two brokers on one storage destroy it: "
        "stop that one, use it by its address, or choose another data directory."
    )


def format_storage(directory: DataDirectory, java: tuple[str, ...], users: tuple[User, ...] = ()) -> None:
    """Give the storage its identity. Done once: formatting what is formatted would be refused by Kafka."""
    arguments = ("kafka.tools.StorageTool", "format", "--standalone", "-t", new_cluster_id())
    command = (*java, *arguments, *scram_arguments(users), "-c", str(directory.server_properties))
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
    if done.returncode != 0:
        raise FatalError(f"Formatting {directory.logs} failed:\n{done.stdout}{done.stderr}")


def new_cluster_id() -> str:
    """A random UUID as Kafka writes it: 22 characters of URL-safe base 64, never beginning with a dash."""
    text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return new_cluster_id() if text.startswith("-") else text
