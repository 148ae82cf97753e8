"""Wires capture: settings to tables, handlers and server."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import structlog
from starlette.applications import Starlette

from rollmill.errors import PoisonRecordError
from rollmill.models import TokenDisposition
from rollmill.runtime.app import Service, ServiceContext
from rollmill.runtime.claim_check import ClaimCheck
from rollmill.runtime.kafka.clients import KafkaClients
from rollmill.runtime.kafka.global_table import GlobalTable
from rollmill.topics import COMPLETIONS, OUTCOMES, POLICIES, SESSIONS
from rollmill_capture.admission import Admission
from rollmill_capture.coordination.membership import Membership
from rollmill_capture.coordination.policies import AnnouncedVersions, PausedPolicies, PolicyPauses
from rollmill_capture.coordination.session_retention import SessionRetention
from rollmill_capture.coordination.session_table import SessionTable
from rollmill_capture.coordination.sessions_topic import SessionsTopic
from rollmill_capture.event_log.event_writer import EventWriter, KafkaEventProducer, LogEventWriter
from rollmill_capture.event_log.spool import Spool, open_spool
from rollmill_capture.event_log.spool_drain import SpoolDrain
from rollmill_capture.http.application import CaptureParts, assemble
from rollmill_capture.http.server import listen, serve
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.capabilities import EngineCapabilities
from rollmill_capture.upstream.client import LoadBalancer, RouteTable, Upstream, make_client
from rollmill_capture.upstream.probe import Probe

SPOOL_SECONDS = 10.0
"""Longest wait of a stopping capture for an empty spool; calls in flight have ended before."""

HTTP = "http"
"""Part of readiness: the tables are read and the server listens."""


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
        self._sessions_topic = SessionsTopic(self._sessions, PolicyPauses(self._pauses, self._announced))
        clients = KafkaClients(settings)
        self._session_reader = GlobalTable(
            clients, settings, SESSIONS, self._sessions_topic.apply, _skip_record, forget=self._sessions_topic.forget
        )
        self._policy_reader = GlobalTable(clients, settings, POLICIES, self._announced.apply, _skip_record)
        self._outcome_reader = GlobalTable(clients, settings, OUTCOMES, self._count_tokens, _skip_record, from_end=True)

    async def read_sessions(self, context: ServiceContext) -> None:
        await self._session_reader.run(context.stop)

    async def read_policies(self, context: ServiceContext) -> None:
        await self._policy_reader.run(context.stop)

    async def read_outcomes(self, context: ServiceContext) -> None:
        """From its end on: it is kept for ever, and admission asks only for what is under way."""
        await self._outcome_reader.run(context.stop)

    def _count_tokens(self, _key: str, outcome: TokenDisposition | None) -> None:
        if outcome is not None:
            self._admission.count_tokens(outcome)

    async def serve(self, context: ServiceContext) -> None:
        """Serve HTTP once what an earlier process spooled is sent and both tables are read; until then the port is
        closed.
        """
        context.health.expect(HTTP)
        self._sessions.on_change = lambda entry: self._admission.observe(entry, context.clock.now())
        async with (
            self._opened_event_writer(context) as event_writer,
            make_client(self._settings) as client,
            self._probing(context, client) as engines,
        ):
            if not await _done_before(context.stop, self._wait_ready(event_writer)):
                return
            membership = Membership(
                self._sessions_topic.pauses, event_writer, context.clock, self._sessions_topic.replicas
            )
            app = assemble(self._parts(context, event_writer, client, engines, membership))
            async with self._housekeeping(context, event_writer, membership):
                await self._listen(context, app)
            await _drain_at_stop(event_writer, self._settings)

    async def _listen(self, context: ServiceContext, app: Starlette) -> None:
        with listen(self._settings) as listener:
            gc.collect()
            gc.freeze()  # what is there by now stays: looking through it again would hold up every stream
            context.health.ready(HTTP)
            structlog.get_logger().info("capture listens", url=self._settings.public)
            await serve(app, listener, self._settings, context.stop)

    @asynccontextmanager
    async def _housekeeping(
        self, context: ServiceContext, event_writer: LogEventWriter, membership: Membership
    ) -> AsyncIterator[None]:
        """Write heartbeats until the last call is done, and remove ended sessions where this replica is the leader."""
        retention = SessionRetention(
            table=self._sessions,
            membership=membership,
            admission=self._admission,
            event_writer=event_writer,
            clock=context.clock,
            metrics=context.metrics,
            retention=self._settings.session_retention_seconds,
        )
        await membership.send_heartbeat()
        working = [asyncio.create_task(work) for work in (membership.send_heartbeats(), retention.run())]
        try:
            yield
        finally:
            for task in working:
                task.cancel()
            await asyncio.wait(working)
            await membership.leave()

    @asynccontextmanager
    async def _probing(self, context: ServiceContext, client: httpx.AsyncClient) -> AsyncIterator[EngineCapabilities]:
        """What is known of the engines; a probe in the background adds to it."""
        for url in self._settings.upstreams_without_scheme:
            structlog.get_logger().warning("an upstream has no scheme; http:// is taken", upstream=url)
        engines = EngineCapabilities(RouteTable(self._settings).trained if self._settings.probe else ())
        probing = asyncio.create_task(Probe(client, engines, context.metrics, context.health.note).watch())
        try:
            yield engines
        finally:
            probing.cancel()
            await asyncio.wait((probing,))

    async def _wait_ready(self, event_writer: LogEventWriter) -> None:
        await event_writer.wait_drained()
        await self._session_reader.caught_up()
        await self._policy_reader.caught_up()
        if self._settings.admission:
            await self._outcome_reader.caught_up()
        self._admission.mark_caught_up()

    @asynccontextmanager
    async def _opened_event_writer(self, context: ServiceContext) -> AsyncIterator[LogEventWriter]:
        settings = self._settings
        seconds = settings.ack_seconds if settings.spool_dir is None else settings.spool_after_seconds
        async with (
            KafkaEventProducer(context.clients, settings.prefix, seconds) as producer,
            opened_spool(settings) as spool,
        ):
            event_writer = LogEventWriter(producer, spool, context.metrics, failpoints=context.failpoints)
            draining = asyncio.create_task(SpoolDrain(event_writer).run())
            try:
                yield event_writer
            finally:
                draining.cancel()
                await asyncio.wait((draining,))

    def _parts(
        self,
        context: ServiceContext,
        event_writer: EventWriter,
        client: httpx.AsyncClient,
        engines: EngineCapabilities,
        membership: Membership,
    ) -> CaptureParts:
        return CaptureParts(
            settings=self._settings,
            sessions=self._sessions,
            position=self._session_reader,
            announced=self._announced,
            event_writer=event_writer,
            upstream=Upstream(
                client, self._pauses, LoadBalancer(self._settings.backoff_seconds), self._settings.reply_bytes
            ),
            clock=context.clock,
            metrics=context.metrics,
            engines=engines,
            claims=ClaimCheck.of(self._settings),
            admission=self._admission,
            membership=membership,
        )


@asynccontextmanager
async def opened_spool(settings: CaptureSettings) -> AsyncIterator[Spool | None]:
    if settings.spool_dir is None:
        structlog.get_logger().warning("no spool is configured: without Kafka, calls are refused (ROLLMILL_SPOOL_DIR)")
        yield None
        return
    spool = await open_spool(settings.spool_dir, settings.prefix, settings.spool_bytes)
    _warn_of_little_space(spool, settings)
    try:
        yield spool
    finally:
        await spool.close()


def _warn_of_little_space(spool: Spool, settings: CaptureSettings) -> None:
    """Calls that the disk has no room for are refused when they come: a warning at the start lets it be changed."""
    calls = spool.free // COMPLETIONS.max_bytes
    if spool.free < settings.spool_bytes and calls < settings.connections:
        structlog.get_logger().warning(
            "the spool's disk has less free than ROLLMILL_SPOOL_BYTES, and bounds the calls at once",
            directory=str(settings.spool_dir),
            free_bytes=spool.free,
            calls_without_max_tokens=calls,
        )


async def _drain_at_stop(event_writer: LogEventWriter, settings: CaptureSettings) -> None:
    """What is still spooled after this is sent by the next start."""
    if not await event_writer.wait_drained(min(SPOOL_SECONDS, settings.drain_seconds / 3)):
        structlog.get_logger().warning("records are left in the spool; the next start sends them")


async def _done_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """True when ``work`` is done; False when ``stop`` was set before."""
    doing, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait((doing, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    doing.cancel()
    return doing.done() and not doing.cancelled()


def _skip_record(key: str, error: PoisonRecordError) -> None:
    structlog.get_logger().warning(
        "a record of a table cannot be read and is skipped", key=key, reason=error.reason, error=str(error)
    )
