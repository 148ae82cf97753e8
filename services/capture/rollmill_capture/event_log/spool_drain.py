"""Sends what was spooled while Kafka was away, in order, and notices when Kafka is back (rule S5)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from rollmill_capture.event_log.event_writer import LogEventWriter, NotAcknowledgedError, RefusedRecordError
from rollmill_capture.event_log.spool import Spool, SpoolFailedError
from rollmill_capture.event_log.spooled_record import SpooledRecord

DRAIN_BYTES = 4 * 2**20
"""Sent from the spool at once."""
RETRY_SECONDS = 1.0
STUCK_AFTER = 3
"""A producer that fails this often in a row while the broker answers is finished, whatever state it reports."""


@dataclass(frozen=True)
class SpoolDrain:
    writer: LogEventWriter

    async def run(self) -> None:
        """Send what is spooled, for ever; while Kafka is away, ask whether it is back."""
        writer, failures = self.writer, 0
        while True:
            await writer.drain_needed.wait()
            try:
                sent = await self._step()
            except SpoolFailedError as error:
                structlog.get_logger().error("what is spooled cannot be sent now, it is tried again", error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if sent:
                failures = 0
                continue
            failures += 1
            if failures >= STUCK_AFTER and await writer.producer.is_reachable():
                await writer.producer.replace()
                failures = 0
            await asyncio.sleep(RETRY_SECONDS)

    async def _step(self) -> bool:
        """Send the oldest records. False: Kafka is still away."""
        writer = self.writer
        spool = writer.spool
        batch = [] if spool is None else await spool.first(DRAIN_BYTES)
        if spool is not None:
            writer.show_spool(spool)  # reading may have found damage
        if not batch or spool is None:
            return await self._rest_when_reachable()
        try:
            await writer.producer.send_all([(record.topic, record.key, record.value) for record in batch])
        except RefusedRecordError:
            await self._send_one_by_one(spool, batch)
        except NotAcknowledgedError as error:
            writer.mark_away(error)
            return False
        else:
            self._mark_back()
            for record in batch:
                writer.metrics.count("written_records", topic=record.topic)
            await spool.remove(batch)
        writer.show_spool(spool)
        return True

    async def _rest_when_reachable(self) -> bool:
        """Nothing is left to send: rest until there is, once Kafka answers."""
        writer = self.writer
        if writer.away and not await writer.producer.is_reachable():
            return False
        self._mark_back()
        if writer.spool is None or writer.spool.empty.is_set():
            writer.drain_needed.clear()
        return True

    async def _send_one_by_one(self, spool: Spool, batch: list[SpooledRecord]) -> None:
        writer = self.writer
        for record in batch:
            try:
                await writer.producer.send(record.topic, record.key, record.value)
            except RefusedRecordError as error:
                structlog.get_logger().error(
                    "Kafka refuses a spooled record: it is set aside in the spool's file",
                    key=record.key,
                    error=str(error),
                )
                writer.metrics.count("spooled_records_set_aside")
                await spool.set_aside(record, str(error))
            except NotAcknowledgedError:
                return
            else:
                writer.metrics.count("written_records", topic=record.topic)
                await spool.remove([record])

    def _mark_back(self) -> None:
        writer = self.writer
        if writer.away:
            structlog.get_logger().info("Kafka is back")
        writer.away = False
        writer.metrics.gauge("kafka_away", 0)
