"""``rollmill up``: Kafka and all services on this machine, until Ctrl-C or until something must not be restarted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from rollmill.cli.up.preflight import (
    check_ports,
    check_settings,
    check_upstream,
    prepare_directory,
    refuse_another_run,
)
from rollmill.cli.up.progress import watch
from rollmill.errors import EXIT_DRAINED, EXIT_FATAL
from rollmill.runtime.kafka.admin import apply_topics
from rollmill.runtime.kafka.embedded import BrokerConfig, EmbeddedKafka
from rollmill.runtime.supervisor import DRAIN_ORDER, Supervisor, running_services
from rollmill.settings import KafkaSettings, load

TARGETS = "metrics-targets.json"


@dataclass(frozen=True)
class Up:
    """Options of the command."""

    upstream: str
    data_dir: Path
    bootstrap_servers: str | None
    prefix: str | None
    port: int
    kafka_port: int
    health_port: int | None = None
    """Of the first service, the others follow; None: free ones."""

    def settings(self, bootstrap_servers: str) -> KafkaSettings:
        given: dict[str, Any] = {} if self.prefix is None else {"prefix": self.prefix}
        return load(KafkaSettings, bootstrap_servers=bootstrap_servers, **given)

    def health_ports(self) -> dict[str, int]:
        """By service; none: they take free ones."""
        first = self.health_port
        return {} if first is None else {service: first + place for place, service in enumerate(DRAIN_ORDER)}

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
    _check(up)
    async with _kafka(up) as bootstrap_servers:
        settings = up.settings(bootstrap_servers)
        await apply_topics(settings)
        await refuse_another_run(settings)
        services = running_services(
            settings,
            up.data_dir / "logs",
            environment=up.environment(),
            report=typer.echo,
            health_ports=up.health_ports(),
        )
        async with services as supervisor:
            typer.echo(f"capture: ready at http://127.0.0.1:{up.port}, in front of {up.upstream}")
            _report_metrics(supervisor, up)
            typer.echo(f"Kafka: {bootstrap_servers}, topics {settings.prefix}*; Ctrl-C drains and stops")
            await _until_alarm(supervisor)


def _check(up: Up) -> None:
    """Raises ConfigurationError for whatever can be known before anything starts."""
    check_upstream(up.upstream)
    os.environ.update(up.environment())
    check_settings()
    prepare_directory(up.data_dir)
    kafka = {} if up.bootstrap_servers is not None else {"--kafka-port": up.kafka_port}
    metrics = {f"--health-port ({service})": port for service, port in up.health_ports().items()}
    check_ports({"--port": up.port, **kafka, **metrics})


@asynccontextmanager
async def _kafka(up: Up) -> AsyncIterator[str]:
    if up.bootstrap_servers is not None:
        yield up.bootstrap_servers
        return
    typer.echo("Kafka: starting (the first time its files are fetched)")
    async with EmbeddedKafka(up.data_dir / "kafka", BrokerConfig(port=up.kafka_port)) as kafka:
        yield kafka.bootstrap_servers


async def _until_alarm(supervisor: Supervisor) -> None:
    """Print what the services count, until one of them has stopped for good."""
    progress = asyncio.create_task(watch(_health_urls(supervisor), typer.echo))
    try:
        await supervisor.fatal_exit()
    finally:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)


def _health_urls(supervisor: Supervisor) -> dict[str, str]:
    return {service: supervisor.health_url(service) for service in DRAIN_ORDER}


def _report_metrics(supervisor: Supervisor, up: Up) -> None:
    """Where metrics are, on the console and in a file that Prometheus reads (``file_sd_configs``)."""
    urls = _health_urls(supervisor)
    targets = [
        {"targets": [url.removeprefix("http://")], "labels": {"service": service}} for service, url in urls.items()
    ]
    path = up.data_dir / TARGETS
    path.write_text(json.dumps(targets, indent=2) + "\n", encoding="utf-8")
    shown = ", ".join(f"{service} {url}/metrics" for service, url in urls.items())
    typer.echo(f"metrics: {shown}; for Prometheus: {path}")
