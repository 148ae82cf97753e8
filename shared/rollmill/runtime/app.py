"""One factory for all services: settings, FastStream shell, tasks, workers, health, metrics, exit code.

The transactional tasks run on aiokafka as asyncio tasks of the FastStream application; FastStream's own broker
carries the at-least-once edges. What a service adds is a `Service`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import stamina
import structlog
from aiokafka.errors import KafkaConnectionError, KafkaError
from faststream import FastStream
from faststream.kafka import KafkaBroker

from rollmill.errors import (
    EXIT_CRASHED,
    EXIT_DRAINED,
    EXIT_FATAL,
    ConfigurationError,
    FatalError,
    RetryableError,
    RollmillError,
)
from rollmill.runtime.failpoints import Failpoints
from rollmill.runtime.kafka.admin import verify_topics
from rollmill.runtime.kafka.client_cancellation import without_client_cancellation
from rollmill.runtime.kafka.clients import KafkaClients, faststream_broker
from rollmill.runtime.stream.processor import Processor
from rollmill.runtime.stream.runner import run_stages
from rollmill.runtime.stream.task_tools import TaskTools
from rollmill.runtime.telemetry.clock import Clock, SystemClock
from rollmill.runtime.telemetry.health import Health, HealthServer
from rollmill.runtime.telemetry.logging import configure_logging
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.settings import ServiceSettings

log = structlog.get_logger(__name__)

STOPS = "the service stops after a failure"
PASSING = (RetryableError, KafkaError, OSError, TimeoutError)

Worker = Callable[["ServiceContext"], Awaitable[None]]


@dataclass(frozen=True)
class Service:
    """What runs: pure stages on the engine, and workers with I/O of their own."""

    name: str
    settings: ServiceSettings
    stages: tuple[Processor[Any, Any], ...] = ()
    workers: tuple[Worker, ...] = ()
    checks: tuple[Worker, ...] = ()
    """Run before anything else: each raises where a condition is not met."""
    uvloop: bool = False
    """Run on uvloop where it is installed: for services that move many small pieces between sockets."""


@dataclass(frozen=True)
class ServiceContext:
    """What a worker may use. It runs until ``stop`` is set, then drains and returns."""

    settings: ServiceSettings
    clients: KafkaClients
    broker: KafkaBroker
    clock: Clock
    stop: asyncio.Event
    metrics: Metrics
    health: Health
    failpoints: Failpoints = field(default_factory=Failpoints)
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all tasks and workers have returned."""
    failures: list[BaseException] = field(default_factory=list)
    """What ended the process; the first one decides the exit code."""
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process is asked to stop; ``stop`` is also set when a part of it ends by itself."""


def run(service: Service) -> int:
    """Run a service until SIGTERM or SIGINT. Returns its exit code: 0 drained on request, 70 fatal, 75 fenced."""
    settings = service.settings
    configure_logging(service=service.name, level=settings.log_level, as_json=settings.log_json)
    try:
        with asyncio.Runner(loop_factory=_loop_factory() if service.uvloop else None) as runner:
            return runner.run(_run(service))
    except SystemExit:  # raised in a callback of the loop, where no job contains it
        log.exception("the service ended without a stop request")
        return EXIT_FATAL


def printed(settings: ServiceSettings) -> str:
    """Every setting with its value, as JSON; of a secret only that there is one."""
    return settings.model_dump_json(indent=2)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if find_spec("uvloop") is None:
        return None
    import uvloop  # noqa: PLC0415  # comes with an extra

    return uvloop.new_event_loop


async def _run(service: Service) -> int:
    context = _context(service)
    server = HealthServer(context.health, context.metrics, service.settings.health_host, service.settings.health_port)
    server.start()
    log.info("service starting", health_port=server.port, pid=os.getpid())
    try:
        await _application(service, context).run(log_level=30)
    except* Exception as failures:  # noqa: BLE001  # every failure decides the exit code
        context.failures.extend(_leaves(failures))
    finally:
        server.stop()
    return _exit_code(context)


def _context(service: Service) -> ServiceContext:
    return ServiceContext(
        settings=service.settings,
        clients=KafkaClients(service.settings),
        broker=faststream_broker(service.settings),
        clock=SystemClock(),
        stop=asyncio.Event(),
        metrics=Metrics(service.name, service.settings.prefix, strict=False),
        health=Health(),
        failpoints=Failpoints.parse(service.settings.failpoints),
    )


def _application(service: Service, context: ServiceContext) -> FastStream:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        await _verified_topics(service.settings)
        for check in service.checks:
            await check(context)
        async with _working(service, context, application):
            yield

    async def drain() -> None:
        """Before FastStream stops the broker: what is being processed may still have to be published."""
        if not context.drained.is_set():
            context.stop_requested.set()
        context.stop.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(context.drained.wait(), service.settings.drain_seconds)

    application = FastStream(context.broker, lifespan=lifespan, on_shutdown=[drain], logger=None)
    return application


async def _verified_topics(settings: ServiceSettings) -> None:
    """Wait for the cluster for a while, then refuse to start on topics that differ from the registry."""
    try:
        async for attempt in stamina.retry_context(
            on=KafkaConnectionError, timeout=settings.connect_seconds, attempts=None
        ):
            with attempt:
                await verify_topics(settings)
    except KafkaConnectionError as error:
        raise ConfigurationError(
            f"Kafka does not answer at {settings.bootstrap_servers}; start it with `rollmill up`, "
            "or set ROLLMILL_BOOTSTRAP_SERVERS"
        ) from error


@asynccontextmanager
async def _working(service: Service, context: ServiceContext, application: FastStream) -> AsyncIterator[None]:
    """Tasks and workers run between start and drain; the first failure asks the application to exit."""
    context.health.expect(service.name)
    await context.broker.start()
    work = asyncio.create_task(_work(service, context, application), name="work")
    try:
        yield
    finally:
        context.health.ready(service.name, ready=False)
        context.stop.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(work, service.settings.drain_seconds)
        log.info("service drained")


async def _work(service: Service, context: ServiceContext, application: FastStream) -> None:
    tools = TaskTools(
        context.settings, context.clients, context.clock, context.metrics, context.health, context.failpoints
    )
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(run_stages(service.stages, tools, context.stop))
            for worker in service.workers:
                group.create_task(_until_stopped(worker, context))
            group.create_task(context.stop.wait())
            await asyncio.sleep(0)  # each has run once, and has declared the parts of readiness to expect
            context.health.ready(service.name)
    except* Exception as failures:  # noqa: BLE001  # every failure is reported and decides the exit code
        context.failures.extend(_leaves(failures))
    if not (context.failures or context.stop_requested.is_set()):
        context.failures.append(FatalError("every task and worker has ended without a stop request"))
    context.drained.set()
    application.exit()


async def _until_stopped(worker: Worker, context: ServiceContext) -> None:
    try:
        await without_client_cancellation(worker(context))
    finally:
        context.stop.set()


def _leaves(group: BaseExceptionGroup[Exception]) -> list[Exception]:
    """The single failures of a group, however deep it is nested."""
    leaves: list[Exception] = []
    for failure in group.exceptions:
        leaves += _leaves(failure) if isinstance(failure, BaseExceptionGroup) else [failure]
    return leaves


def _exit_code(context: ServiceContext) -> int:
    # Last is the first failure: it decides the exit code, and whoever reads the log's end finds it there.
    for failure in reversed(context.failures):
        fault = None if isinstance(failure, RollmillError) else failure  # what was raised on purpose explains itself
        log.error(STOPS, error=str(failure), kind=type(failure).__name__, exc_info=fault)
    if not context.failures:
        return EXIT_DRAINED
    return exit_code(context.failures[0])


def exit_code(failure: BaseException) -> int:
    """The exit code for a supervisor: a restart helps after a passing failure outside, not after a fault of ours."""
    if isinstance(failure, FatalError):
        return failure.exit_code
    return EXIT_CRASHED if isinstance(failure, PASSING) else EXIT_FATAL
