"""The demo under a Prometheus: every service and the ledger's exporter are scraped while it learns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from dashboards.panels import Panel, substituted
from dashboards.prometheus import Prometheus, Series, running_prometheus
from relay.display import Display
from relay.loop import Loop, Played
from relay.model import from_bytes, to_bytes, use_one_thread, warm_start
from relay.options import Options
from relay.pipeline import kafka_at, running_pipeline
from rollmill.errors import FatalError
from rollmill.runtime.supervisor import DRAIN_ORDER, Program, Supervisor, free_port
from rollmill.runtime.supervisor.stack import kafka_environment
from rollmill.settings import KafkaSettings

LEDGER = "ledger"
SCRAPE_SECONDS = 1
RATE_SECONDS = 20
"""Window of rates: a few scrapes."""


@dataclass(frozen=True)
class Recording:
    """A run that is over, and the Prometheus that saw it; all processes still run."""

    prometheus: Prometheus
    prefix: str
    targets: dict[str, str]
    """``host:port`` of each component."""
    played: Played
    start: float
    """Before the first scrapes, which are before the run: rates are of what came after a counter's first scrape."""
    end: float
    """After the last scrapes. Both are seconds since the epoch."""

    def variables(self, rate_seconds: int = RATE_SECONDS) -> dict[str, str]:
        """Grafana's variables, as for this run."""
        return {"prefix": self.prefix, "__rate_interval": f"{rate_seconds}s"}

    async def newest(self, expr: str) -> list[Series]:
        """Series now; rates are over the whole run."""
        since = int(time.time() - self.start) + 1
        return await self.prometheus.newest(substituted(expr, self.variables(since)))

    async def drawn(self, panel: Panel) -> list[list[Series]]:
        """For each target of the panel its series over the whole run."""
        step = max(1.0, (self.end - self.start) / 300)
        expressions = [substituted(target.expr, self.variables()) for target in panel.targets]
        return [await self.prometheus.between(expr, self.start, self.end, step) for expr in expressions]


@asynccontextmanager
async def recorded(program: str, directory: Path, options: Options, display: Display) -> AsyncIterator[Recording]:
    """Play the demo with ``options`` and hand over what Prometheus (``program``) recorded of it."""
    use_one_thread()
    model = asyncio.create_task(asyncio.to_thread(warm_start, options.seed))
    async with kafka_at(options.bootstrap_servers, directory, display.say) as servers:
        settings = _settings(options, servers)
        weights = to_bytes((await model).state_dict())
        file = directory / "warm.safetensors"
        file.write_bytes(weights)
        engine = {"weights": str(file), "seed": str(options.seed), "sabotage": options.sabotage.value}
        async with running_pipeline(settings, directory, engine, display.say) as pipeline:
            targets = await _targets(pipeline.supervisor, settings, display.say)
            start = time.time()
            async with running_prometheus(program, directory / "prometheus", targets, SCRAPE_SECONDS) as prometheus:
                await _scraped(prometheus, targets, start)  # it takes Prometheus seconds to begin
                played = await Loop(options, settings, pipeline, from_bytes(weights), display).play()
                await _scraped(prometheus, targets, await _looked(prometheus, settings.prefix, time.time()))
                yield Recording(prometheus, settings.prefix, targets, played, start, time.time())


async def _scraped(prometheus: Prometheus, targets: Collection[str], since: float) -> None:
    """Return once every target has answered a scrape that began after ``since``."""
    await prometheus.until(f"up == 1 and timestamp(up) > {since}", len(targets))


async def _looked(prometheus: Prometheus, prefix: str, since: float) -> float:
    """When the first look of the ledger's exporter that began after ``since`` had ended.

    What it exports is when a look ended, so the first end after ``since`` may be of a look that began before.
    """
    ended = f'rollmill_ledger_looked_timestamp_seconds{{prefix="{prefix}"}}'
    for _ in range(2):
        (seen,) = await prometheus.until(f"{ended} > {since}")
        since = seen.points[0][1]
    return since


def _settings(options: Options, bootstrap_servers: str) -> KafkaSettings:
    """A prefix of its own, so that a cluster may be used again."""
    return KafkaSettings(
        bootstrap_servers=bootstrap_servers,
        prefix=f"board-{uuid4().hex[:8]}.",
        partitions=options.partitions,
        batch_partitions=options.ranks,
        run="relay",
    )


async def _targets(
    supervisor: Supervisor | None, settings: KafkaSettings, report: Callable[[str], None]
) -> dict[str, str]:
    """Addresses of the services, and of the ledger's exporter, which is started."""
    if supervisor is None:
        raise FatalError("the services have to be started here, or their addresses are not known")
    port = free_port()
    kafka = ("--bootstrap-servers", settings.bootstrap_servers, "--prefix", settings.prefix)
    arguments = ("ledger", "--metrics-port", str(port), "--every", "1", *kafka)
    await supervisor.start(Program(LEDGER, "rollmill.cli", kafka_environment(settings), arguments))
    addresses = {name: supervisor.health_url(name).removeprefix("http://") for name in DRAIN_ORDER}
    report(f"metrics: {', '.join(sorted(addresses))}, and the ledger's at 127.0.0.1:{port}")
    return {**addresses, LEDGER: f"127.0.0.1:{port}"}
