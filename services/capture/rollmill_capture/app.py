"""Wires capture: settings to tables, handlers and server."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import structlog
from starlette.applications import Starlette

from rollmill.errors import PoisonRecordError
from rollmill.models import SessionSpec, TokenDisposition
from rollmill.runtime.app import Service, ServiceContext
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.global_table import GlobalTable
from rollmill.runtime.telemetry.clock import Clock
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.strategies import validate_session_spec
from rollmill.topics import COMPLETIONS, OUTCOMES, POLICIES, SESSIONS
from rollmill_capture.admission import Admission
from rollmill_capture.apis.history_cache import HistoryCache
from rollmill_capture.coordination.membership import Membership
from rollmill_capture.coordination.policy_pauses import PolicyPauses
from rollmill_capture.coordination.policy_versions import AnnouncedVersions
from rollmill_capture.coordination.session_retention import SessionRetention
from rollmill_capture.coordination.session_table import Position, SessionTable
from rollmill_capture.coordination.sessions_topic import SessionsTopic
from rollmill_capture.event_log.event_writer import EventWriter, LogEventWriter
from rollmill_capture.event_log.producer import KafkaEventProducer
from rollmill_capture.event_log.spool import Spool, open_spool
from rollmill_capture.http.admin import AdminApi
from rollmill_capture.http.application import make_application
from rollmill_capture.http.idempotency import Idempotency
from rollmill_capture.http.model_calls import Caller
from rollmill_capture.http.routes import call_routes
from rollmill_capture.http.server import listen, serve
from rollmill_capture.http.session_resolver import SessionResolver
from rollmill_capture.http.sessions import SessionApi
from rollmill_capture.proxy.recorder import Recorder
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.capabilities import EngineCapabilities
from rollmill_capture.upstream.client import LoadBalancer, RouteTable, Upstream, make_client
from rollmill_capture.upstream.policy_pause import PausedPolicies
from rollmill_capture.upstream.probe import Probe

SPOOL_SECONDS = 10.0
"""Longest wait of a stopping capture for an empty spool; calls in flight have ended before."""

HTTP = "http"
"""Part of readiness: the tables are read and the server listens."""


@dataclass(frozen=True)
class CaptureParts:
    """What the HTTP application is made of; tests put fakes in place of the outside world."""

    settings: CaptureSettings
    sessions: SessionTable
    position: Position
    announced: AnnouncedVersions
    sink: EventWriter
    upstream: Upstream
    clock: Clock
    metrics: Metrics
    validate: Callable[[SessionSpec], None] = validate_session_spec
    engines: EngineCapabilities = field(default_factory=EngineCapabilities)
    admission: Admission | None = None
    """None: everything is admitted."""
    claims: ClaimCheck | None = None
    """None: every record lies in the log."""
    fleet: Membership | None = None
    """None: this replica is the only one."""


def assemble(parts: CaptureParts) -> Starlette:
    """The HTTP application."""
    settings, routes = parts.settings, RouteTable(parts.settings)
    desk = SessionResolver(parts.sessions, parts.position, settings.lookup_seconds, settings.keys)
    admission = parts.admission or Admission({}, parts.announced.newest)
    sessions = SessionApi(
        desk=desk,
        sink=parts.sink,
        clock=parts.clock,
        metrics=parts.metrics,
        public_url=settings.public,
        policies=settings.policies,
        close_seconds=settings.close_seconds,
        admission=admission,
        validate=parts.validate,
    )
    fleet = parts.fleet or Membership(PolicyPauses(parts.upstream.pauses, parts.announced), parts.sink, parts.clock)
    admin = AdminApi(desk, fleet.gates, fleet, parts.sink)
    recorder = Recorder(parts.sink, parts.announced, parts.clock, parts.metrics, parts.engines, parts.claims)
    caller = Caller(
        desk=desk,
        routes=routes,
        upstream=parts.upstream,
        recorder=recorder,
        engines=parts.engines,
        memory=HistoryCache(),
        request_bytes=settings.request_bytes,
        keep_alive_seconds=settings.keep_alive_seconds,
    )
    fence = Idempotency(parts.metrics, seconds=settings.replay_seconds, room=settings.replay_bytes)
    calls = call_routes(caller, lambda endpoint: fence.around(endpoint, desk.named_for_retries))
    return make_application(sessions, calls, admin)


def build(settings: CaptureSettings) -> Service:
    """Capture as a service: two table readers and the HTTP server, side by side."""
    program = Program(settings)
    readers = (program.read_sessions, program.read_policies)
    admission = (program.read_outcomes,) if settings.admission else ()
    return Service("capture", settings, workers=(*readers, *admission, program.serve), uvloop=True)


class Program:
    """The workers of capture, and what they share."""

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._sessions = SessionTable()
        self._announced = AnnouncedVersions()
        self._admission = Admission(settings.admission, self._announced.newest)
        self._pauses = PausedPolicies(settings.pause_seconds)
        self._board = SessionsTopic(self._sessions, PolicyPauses(self._pauses, self._announced))
        clients = KafkaClients(settings)
        self._session_reader = GlobalTable(
            clients, settings, SESSIONS, self._board.apply, _pass_over, forget=self._board.forget
        )
        self._policy_reader = GlobalTable(clients, settings, POLICIES, self._announced.apply, _pass_over)
        self._outcome_reader = GlobalTable(clients, settings, OUTCOMES, self._hear, _pass_over, from_end=True)

    async def read_sessions(self, context: ServiceContext) -> None:
        await self._session_reader.run(context.stop)

    async def read_policies(self, context: ServiceContext) -> None:
        await self._policy_reader.run(context.stop)

    async def read_outcomes(self, context: ServiceContext) -> None:
        """From its end on: it is kept for ever, and admission asks only for what is under way."""
        await self._outcome_reader.run(context.stop)

    def _hear(self, _key: str, outcome: TokenDisposition | None) -> None:
        if outcome is not None:
            self._admission.hear(outcome)

    async def serve(self, context: ServiceContext) -> None:
        """Serve HTTP once what an earlier process spooled is sent and both tables are read; who asks earlier finds
        nobody listening.
        """
        context.health.expect(HTTP)
        self._sessions.watch = lambda entry: self._admission.see(entry, context.clock.now())
        async with (
            self._sink(context) as sink,
            make_client(self._settings) as client,
            self._probing(context, client) as engines,
        ):
            if not await _before(context.stop, self._prepared(sink)):
                return
            fleet = Membership(self._board.gates, sink, context.clock, self._board.replicas)
            app = assemble(self._parts(context, sink, client, engines, fleet))
            async with self._keeping_house(context, sink, fleet):
                await self._listen(context, app)
            await _emptied(sink, self._settings)

    async def _listen(self, context: ServiceContext, app: Starlette) -> None:
        with listen(self._settings) as listener:
            gc.collect()
            gc.freeze()  # what is there by now stays: looking through it again would hold up every stream
            context.health.ready(HTTP)
            structlog.get_logger().info("capture listens", url=self._settings.public)
            await serve(app, listener, self._settings, context.stop)

    @asynccontextmanager
    async def _keeping_house(
        self, context: ServiceContext, sink: LogEventWriter, fleet: Membership
    ) -> AsyncIterator[None]:
        """Give signs of life until the last call is done, and tidy up where it is this replica's turn."""
        sweeper = SessionRetention(
            table=self._sessions,
            fleet=fleet,
            admission=self._admission,
            sink=sink,
            clock=context.clock,
            metrics=context.metrics,
            retention=self._settings.session_retention_seconds,
        )
        await fleet.tell()
        working = [asyncio.create_task(work) for work in (fleet.beat(), sweeper.run())]
        try:
            yield
        finally:
            for task in working:
                task.cancel()
            await asyncio.wait(working)
            await fleet.leave()

    @asynccontextmanager
    async def _probing(self, context: ServiceContext, client: httpx.AsyncClient) -> AsyncIterator[EngineCapabilities]:
        """What is known of the engines, and more of it as time goes by."""
        engines = EngineCapabilities(RouteTable(self._settings).trained if self._settings.probe else ())
        probing = asyncio.create_task(Probe(client, engines, context.metrics).watch())
        try:
            yield engines
        finally:
            probing.cancel()
            await asyncio.wait((probing,))

    async def _prepared(self, sink: LogEventWriter) -> None:
        await sink.emptied()
        await self._session_reader.caught_up()
        await self._policy_reader.caught_up()
        if self._settings.admission:
            await self._outcome_reader.caught_up()
        self._admission.start()

    @asynccontextmanager
    async def _sink(self, context: ServiceContext) -> AsyncIterator[LogEventWriter]:
        settings = self._settings
        seconds = settings.ack_seconds if settings.spool_dir is None else settings.spool_after_seconds
        async with (
            KafkaEventProducer(context.clients, settings.prefix, seconds) as log,
            opened_spool(settings) as spool,
        ):
            sink = LogEventWriter(log, spool, context.metrics, failpoints=context.failpoints)
            draining = asyncio.create_task(sink.drain())
            try:
                yield sink
            finally:
                draining.cancel()
                await asyncio.wait((draining,))

    def _parts(
        self,
        context: ServiceContext,
        sink: EventWriter,
        client: httpx.AsyncClient,
        engines: EngineCapabilities,
        fleet: Membership,
    ) -> CaptureParts:
        return CaptureParts(
            settings=self._settings,
            sessions=self._sessions,
            position=self._session_reader,
            announced=self._announced,
            sink=sink,
            upstream=Upstream(client, self._pauses, LoadBalancer(self._settings.backoff_seconds)),
            clock=context.clock,
            metrics=context.metrics,
            engines=engines,
            claims=ClaimCheck.of(self._settings),
            admission=self._admission,
            fleet=fleet,
        )


@asynccontextmanager
async def opened_spool(settings: CaptureSettings) -> AsyncIterator[Spool | None]:
    if settings.spool_dir is None:
        structlog.get_logger().warning("no spool is configured: without Kafka, calls are refused (ROLLMILL_SPOOL_DIR)")
        yield None
        return
    spool = await open_spool(settings.spool_dir, settings.prefix, settings.spool_bytes)
    _tell_room(spool, settings)
    try:
        yield spool
    finally:
        await spool.close()


def _tell_room(spool: Spool, settings: CaptureSettings) -> None:
    """Calls that the disk has no room for are refused when they come: said at the start, while it can be changed."""
    calls = spool.free // COMPLETIONS.max_bytes
    if spool.free < settings.spool_bytes and calls < settings.connections:
        structlog.get_logger().warning(
            "the spool's disk has less free than ROLLMILL_SPOOL_BYTES, and bounds the calls at once",
            directory=str(settings.spool_dir),
            free_bytes=spool.free,
            calls_without_max_tokens=calls,
        )


async def _emptied(sink: LogEventWriter, settings: CaptureSettings) -> None:
    """What is still spooled after this is sent by the next start."""
    if not await sink.emptied(min(SPOOL_SECONDS, settings.drain_seconds / 3)):
        structlog.get_logger().warning("records are left in the spool; the next start sends them")


async def _before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """True when ``work`` is done; False when ``stop`` was set before."""
    doing, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((doing, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    doing.cancel()
    return doing.done() and not doing.cancelled()


def _pass_over(key: str, error: PoisonRecordError) -> None:
    structlog.get_logger().warning("a record of a table is passed over", key=key, reason=error.reason, error=str(error))
