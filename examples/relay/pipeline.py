"""Everything that the demo starts: Kafka, the five services, the engine."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from relay.capture_sessions import EVALUATOR
from rollmill.runtime.kafka.embedded import EmbeddedKafka
from rollmill.runtime.supervisor import Program, Supervisor, free_port, running_services
from rollmill.settings import KafkaSettings

GROUPS_PER_STEP = 8
GROUP_SIZE = 8
GROUPS_AT_ONCE = 5
MAX_STALENESS = 2
STEPS_AHEAD = 1
EVALUATIONS_AT_ONCE = 32

ENGINE = "engine"
_READY_SECONDS = 60.0
_PROBE_SECONDS = 0.1


@dataclass(frozen=True)
class Pipeline:
    """Addresses of what runs."""

    supervisor: Supervisor | None
    """None: somebody else keeps it running."""
    capture: str
    engine: str
    key: str | None = None
    """The tenant's key; None: capture asks for none."""

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}


@asynccontextmanager
async def kafka_at(given: str | None, directory: Path, report: Callable[[str], None]) -> AsyncIterator[str]:
    """The address of a cluster: the given one, or Apache Kafka with its data under ``directory``."""
    if given is not None:
        yield given
        return
    report("Kafka: starting (the first time its files are fetched)")
    async with EmbeddedKafka(directory / "kafka") as kafka:
        yield kafka.bootstrap_servers


@asynccontextmanager
async def running_pipeline(
    settings: KafkaSettings, directory: Path, engine: Mapping[str, str], report: Callable[[str], None]
) -> AsyncIterator[Pipeline]:
    """The engine with its options, and all services in front of it, ready; drained in order at the end."""
    engine_port, capture_port = free_port(), free_port()
    upstream = f"http://127.0.0.1:{engine_port}"
    environment = _environment(upstream, capture_port, settings.batch_partitions)
    services = running_services(settings, directory / "logs", environment=environment, report=report)
    async with services as supervisor:
        options = {"port": str(engine_port), **engine}
        arguments = tuple(word for name, value in options.items() for word in (f"--{name}", value))
        await supervisor.start(Program(ENGINE, "relay.engine", arguments=arguments))
        await _healthy(upstream)
        yield Pipeline(supervisor, f"http://127.0.0.1:{capture_port}", upstream)


def _environment(upstream: str, capture_port: int, ranks: int) -> dict[str, str]:
    """Our own, with this package on the path: the services import the demo's grader and builder by name."""
    examples = str(Path(__file__).resolve().parent.parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [examples, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "ROLLMILL_STRATEGY_MODULES": EVALUATOR.partition(":")[0],
        "ROLLMILL_UPSTREAM": upstream,
        "ROLLMILL_PORT": str(capture_port),
        "ROLLMILL_LINGER_MS": "200",
        "ROLLMILL_GROUPS_PER_STEP": str(GROUPS_PER_STEP),
        "ROLLMILL_MAX_STALENESS": str(MAX_STALENESS),
        "ROLLMILL_STEPS_AHEAD": str(STEPS_AHEAD),
        "ROLLMILL_WORLD_SIZE": str(ranks),
        "ROLLMILL_MICRO_BATCH_TOKENS": "1024",
        "ROLLMILL_EVALUATOR_CONCURRENCY_OF": json.dumps({EVALUATOR: EVALUATIONS_AT_ONCE}),  # a name to count from 0
    }


async def _healthy(base_url: str) -> None:
    """Returns once the engine answers; importing torch takes it seconds."""
    async with httpx.AsyncClient(base_url=base_url) as http, asyncio.timeout(_READY_SECONDS):
        while True:
            with suppress(httpx.TransportError):
                (await http.get("/health")).raise_for_status()
                return
            await asyncio.sleep(_PROBE_SECONDS)
