"""``rollmill up``: Kafka and all services on this machine, until Ctrl-C or until something must not be restarted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from rollmill.errors import EXIT_DRAINED, EXIT_FATAL
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.embedded import BrokerConfig, EmbeddedKafka
from rollmill.runtime.supervisor import Supervisor, running_services
from rollmill.settings import KafkaSettings
from rollmill.topics import BATCHES, BUILT, COMPLETIONS, DEAD_LETTERS, EVALUATIONS, TRAJECTORIES, Topic

WATCHED = (COMPLETIONS, BUILT, EVALUATIONS, TRAJECTORIES, BATCHES, DEAD_LETTERS)
WATCH_SECONDS = 5.0


@dataclass(frozen=True)
class Up:
    """Options of the command."""

    upstream: str
    data_dir: Path
    bootstrap_servers: str | None
    prefix: str | None
    port: int
    kafka_port: int

    def settings(self, bootstrap_servers: str) -> KafkaSettings:
        given: dict[str, Any] = {} if self.prefix is None else {"prefix": self.prefix}
        return KafkaSettings(bootstrap_servers=bootstrap_servers, **given)

    def environment(self) -> dict[str, str]:
        """The environment of this process, so that ``ROLLMILL_*`` reaches the services; options override it."""
        spool = {"ROLLMILL_SPOOL_DIR": str(self.data_dir / "spool")}
        return {**spool, **os.environ, "ROLLMILL_UPSTREAM": self.upstream, "ROLLMILL_PORT": str(self.port)}


async def run(up: Up) -> int:
    """Run everything. Returns 0 when stopped by a signal and drained, 70 when a service stopped for good."""
    work = asyncio.create_task(_serve(up))
    _cancel_at_a_signal(work)
    try:
        await work
    except asyncio.CancelledError:
        typer.echo("drained")
        return EXIT_DRAINED
    typer.echo("stopped: the messages above say what has to be fixed", err=True)
    return EXIT_FATAL


def _cancel_at_a_signal(work: asyncio.Task[None]) -> None:
    """The first signal drains; further ones change nothing."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def ask() -> None:
        if not asked.is_set():
            asked.set()
            work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ask)


async def _serve(up: Up) -> None:
    """Run until cancelled (then drain), or until a service must not be restarted."""
    async with _kafka(up) as bootstrap_servers:
        settings = up.settings(bootstrap_servers)
        services = running_services(settings, up.data_dir / "logs", environment=up.environment(), report=typer.echo)
        async with services as supervisor:
            typer.echo(f"capture: ready at http://127.0.0.1:{up.port}, in front of {up.upstream}")
            typer.echo(f"Kafka: {bootstrap_servers}, topics {settings.prefix}*; Ctrl-C drains and stops")
            await _until_alarm(supervisor, settings)


@asynccontextmanager
async def _kafka(up: Up) -> AsyncIterator[str]:
    if up.bootstrap_servers is not None:
        yield up.bootstrap_servers
        return
    typer.echo("Kafka: starting (the first time its files are fetched)")
    async with EmbeddedKafka(up.data_dir / "kafka", BrokerConfig(port=up.kafka_port)) as kafka:
        yield kafka.bootstrap_servers


async def _until_alarm(supervisor: Supervisor, settings: KafkaSettings) -> None:
    """Print what arrives in the topics, until a service has stopped for good."""
    progress = asyncio.create_task(watch_topics(settings, typer.echo))
    try:
        await supervisor.fatal_exit()
    finally:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)


async def watch_topics(settings: KafkaSettings, report: Callable[[str], None]) -> None:
    """Report the end offsets of the main topics whenever they have changed, until cancelled.

    Offsets count the markers of transactions, too: a measure of progress, not a number of records.
    """
    reported = ""
    async with KafkaClients(settings).reading(reset="earliest") as consumer:
        while True:
            try:
                ends = await consumer.end_offsets([tp for topic in WATCHED for tp in _partitions(topic, settings)])
            except KafkaError as error:
                line = f"log: Kafka does not answer ({type(error).__name__})"
            else:
                line = _line(ends, settings)
            if line != reported:
                report(line)
            reported = line
            await asyncio.sleep(WATCH_SECONDS)


def _partitions(topic: Topic, settings: KafkaSettings) -> list[TopicPartition]:
    name = topic.full_name(settings.prefix)
    return [TopicPartition(name, number) for number in range(topic.partitions(settings))]


def _line(ends: dict[TopicPartition, int], settings: KafkaSettings) -> str:
    sums = {topic.name: sum(ends[tp] for tp in _partitions(topic, settings)) for topic in WATCHED}
    return "log: " + ", ".join(f"{name} {offset}" for name, offset in sums.items())
