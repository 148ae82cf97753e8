"""The spool and the event writer: what is acknowledged while Kafka is away, and in which order it is sent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog

from rollmill.codec import Headers
from rollmill.errors import BackpressureError, ConfigurationError
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import COMPLETIONS, SESSIONS
from rollmill_capture.app import opened_spool
from rollmill_capture.event_log.event_writer import LogEventWriter, NotAcknowledgedError, RefusedRecordError
from rollmill_capture.event_log.spool import NoRoomError, Spool, open_spool
from rollmill_capture.event_log.spool_drain import SpoolDrain
from rollmill_capture.event_log.spool_recovery import open_spool_store
from rollmill_capture.event_log.spooled_record import SpooledRecord
from rollmill_capture.settings import CaptureSettings

WAIT = 5.0


@dataclass
class Log:
    """Kafka as it behaves: away it acknowledges nothing, and what it was given may be there all the same."""

    here: asyncio.Event = field(default_factory=asyncio.Event)
    keeps: bool = False
    refuses: Callable[[bytes], bool] = lambda _: False
    sent: list[tuple[str, str, bytes]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    replaced: int = 0

    async def send(self, topic: str, key: str, value: bytes | None, headers: Headers = ()) -> None:
        del headers
        await self.send_all([(topic, key, value or b"")])

    async def send_all(self, records: Sequence[tuple[str, str, bytes]]) -> None:
        self.asked.set()
        if any(self.refuses(value) for _, _, value in records):
            raise RefusedRecordError("too large")
        if self.here.is_set() or self.keeps:
            self.sent.extend(records)
        if not self.here.is_set():
            raise NotAcknowledgedError("away")

    async def is_reachable(self) -> bool:
        return self.here.is_set()

    async def replace(self) -> None:
        self.replaced += 1

    @property
    def values(self) -> list[bytes]:
        return [value for _, _, value in self.sent]


@asynccontextmanager
async def spooling(path: Path, log: Log, limit: int = 1000) -> AsyncIterator[tuple[LogEventWriter, Spool]]:
    spool = await open_spool(path, "t.", limit)
    event_writer = LogEventWriter(log, spool, Metrics("capture"))
    draining = asyncio.create_task(SpoolDrain(event_writer).run())
    try:
        yield event_writer, spool
    finally:
        draining.cancel()
        await asyncio.wait((draining,))
        await spool.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill_capture.event_log.spool_drain.RETRY_SECONDS", 0.01)


async def test_without_kafka_records_are_acknowledged_by_the_disk_and_sent_in_order_later(tmp_path: Path) -> None:
    log = Log()
    async with spooling(tmp_path, log) as (event_writer, spool), asyncio.timeout(WAIT):
        await asyncio.gather(
            *(event_writer.append(COMPLETIONS, f"s{number % 3}", b"%d" % number) for number in range(9))
        )
        assert (log.sent, spool.records, spool.used) == ([], 9, 9)
        log.here.set()
        assert await event_writer.wait_drained()
        assert sorted(log.values) == [b"%d" % number for number in range(9)]
        for session in range(3):
            mine = [value for _, key, value in log.sent if key == f"s{session}"]
            assert mine == sorted(mine)
        assert not event_writer.away


async def test_while_a_session_has_spooled_records_its_later_ones_go_behind_them(tmp_path: Path) -> None:
    log = Log()
    async with spooling(tmp_path, log) as (event_writer, spool), asyncio.timeout(WAIT):
        await event_writer.append(COMPLETIONS, "s1", b"first")
        event_writer.away = False
        await event_writer.append(SESSIONS, "s1", b"second")
        assert (spool.records, log.sent) == (2, [])
        log.here.set()
        await event_writer.wait_drained()
        await event_writer.append(COMPLETIONS, "s1", b"third")
        assert log.values == [b"first", b"second", b"third"]
        assert [topic for topic, _, _ in log.sent] == ["completions", "sessions", "completions"]


async def test_what_an_unacknowledged_send_delivers_later_is_there_twice_and_never_missing(tmp_path: Path) -> None:
    log = Log(keeps=True)
    async with spooling(tmp_path, log) as (event_writer, _), asyncio.timeout(WAIT):
        await event_writer.append(COMPLETIONS, "s1", b"call")
        log.here.set()
        await event_writer.wait_drained()
        assert set(log.values) == {b"call"}
        assert len(log.values) > 1


async def test_the_next_start_finds_what_a_dead_process_left_and_sends_it_first(tmp_path: Path) -> None:
    async with spooling(tmp_path, Log()) as (event_writer, _):
        await event_writer.append(COMPLETIONS, "s1", b"before")
    log = Log()
    log.here.set()
    async with spooling(tmp_path, log) as (event_writer, spool), asyncio.timeout(WAIT):
        assert spool.holds("s1") or log.sent
        await event_writer.append(COMPLETIONS, "s1", b"after")
        await event_writer.wait_drained()
        assert log.values == [b"before", b"after"]


@pytest.mark.parametrize("kafka_is_well", [True, False])
async def test_room_is_kept_before_the_call_while_kafka_is_well_too(tmp_path: Path, *, kafka_is_well: bool) -> None:
    log = Log()
    async with spooling(tmp_path, log, limit=100) as (event_writer, spool):
        event_writer.away = not kafka_is_well
        with event_writer.reserve_space(60):
            assert spool.reserved == 60
            with pytest.raises(NoRoomError, match="60 reserved"), event_writer.reserve_space(60):
                raise AssertionError("there is no room")
            await event_writer.append(COMPLETIONS, "s1", bytes(30))
            assert event_writer.away
            with pytest.raises(NoRoomError, match="30 of 100 are used and 60 reserved"), event_writer.reserve_space(20):
                raise AssertionError("there is no room")
            with event_writer.reserve_space(10):
                assert spool.reserved == 70
        assert spool.reserved == 0


async def test_a_record_that_outgrows_its_room_is_taken_all_the_same(tmp_path: Path) -> None:
    async with spooling(tmp_path, Log(), limit=100) as (event_writer, spool):
        with event_writer.reserve_space(50):
            await event_writer.append(COMPLETIONS, "s1", bytes(200))
        assert spool.used == 200
        with pytest.raises(NoRoomError), event_writer.reserve_space(1):
            raise AssertionError("there is no room")


async def test_the_disks_free_space_bounds_the_room(tmp_path: Path) -> None:
    now, free = 0.0, 100
    thread = ThreadPoolExecutor(1)
    spool = Spool(open_spool_store(tmp_path, "t."), thread, 1000, lambda: free, lambda: now)
    with spool.reserve_space(80), pytest.raises(NoRoomError, match="0 of 100 are used"), spool.reserve_space(30):
        raise AssertionError("there is no room")
    now, free = 2.0, 200
    with spool.reserve_space(150):
        assert spool.reserved == 150
    await spool.close()


async def test_a_thousand_calls_without_a_limit_have_room_on_a_disk_with_ten_gigabytes(tmp_path: Path) -> None:
    spool = Spool(open_spool_store(tmp_path, "t."), ThreadPoolExecutor(1), 32 * 2**30, lambda: 10 * 10**9)
    with ExitStack() as rooms:
        for _ in range(1024):
            rooms.enter_context(spool.reserve_space(COMPLETIONS.max_bytes))
        more = spool.free // COMPLETIONS.max_bytes
        assert more == 168
        for _ in range(more):
            rooms.enter_context(spool.reserve_space(COMPLETIONS.max_bytes))
        with pytest.raises(NoRoomError, match="disk's free space; `max_tokens` bounds") as refused:
            rooms.enter_context(spool.reserve_space(COMPLETIONS.max_bytes))
        assert refused.value.retry_after == 5
        rooms.enter_context(spool.reserve_space(100_000))
    assert spool.reserved == 0
    await spool.close()


@pytest.mark.parametrize(("limit", "told"), [(1, False), (2**60, True)])
async def test_a_disk_that_bounds_the_calls_at_once_is_told_at_the_start(
    tmp_path: Path, limit: int, *, told: bool
) -> None:
    settings = CaptureSettings(spool_dir=tmp_path, spool_bytes=limit, connections=2**40)
    with structlog.testing.capture_logs() as logs:
        async with opened_spool(settings):
            pass
    assert [line.get("calls_without_max_tokens", 0) > 0 for line in logs] == ([True] if told else [])


async def test_what_loses_its_meaning_with_time_is_never_spooled(tmp_path: Path) -> None:
    log = Log()
    async with spooling(tmp_path, log) as (event_writer, spool), asyncio.timeout(WAIT):
        with pytest.raises(NotAcknowledgedError):
            await event_writer.append_best_effort(SESSIONS, "s1", b"alive")
        assert (event_writer.away, spool.records) == (True, 0)
        await event_writer.append(SESSIONS, "s1", b"closed")
        log.here.set()
        await event_writer.wait_drained()
        await event_writer.append_best_effort(SESSIONS, "s1", None)
        assert log.values == [b"closed", b""]


async def test_a_call_that_has_its_room_is_never_refused_afterwards(tmp_path: Path) -> None:
    async with spooling(tmp_path, Log(), limit=100) as (event_writer, spool):
        for number in range(4):
            with event_writer.reserve_space(25):
                await event_writer.append(COMPLETIONS, f"s{number}", bytes(25))
        assert spool.used == 100
        with pytest.raises(BackpressureError), event_writer.reserve_space(1):
            raise AssertionError("there is no room")


async def test_without_a_spool_the_loss_of_kafka_is_told_until_it_answers_again() -> None:
    log = Log()
    event_writer = LogEventWriter(log, None, Metrics("capture"))
    with pytest.raises(NotAcknowledgedError):
        await event_writer.append(COMPLETIONS, "s1", b"call")
    with pytest.raises(BackpressureError, match="ROLLMILL_SPOOL_DIR"), event_writer.reserve_space(1):
        raise AssertionError("there is no room")
    assert not await SpoolDrain(event_writer)._step()
    log.here.set()
    assert await SpoolDrain(event_writer)._step()
    with event_writer.reserve_space(1):
        await event_writer.append(COMPLETIONS, "s1", b"call")


async def test_a_record_that_the_log_refuses_does_not_hold_up_the_others(tmp_path: Path) -> None:
    log = Log(refuses=lambda value: value == b"bad")
    async with spooling(tmp_path, log) as (event_writer, spool), asyncio.timeout(WAIT):
        event_writer.away = True
        for value in (b"one", b"bad", b"two"):
            await event_writer.append(COMPLETIONS, "s1", value)
        log.here.set()
        await event_writer.wait_drained()
        assert log.values == [b"one", b"two"]
        assert spool.used == 0


async def test_a_producer_that_delivers_nothing_although_the_broker_answers_is_replaced(tmp_path: Path) -> None:
    class Stuck(Log):
        async def is_reachable(self) -> bool:
            return True

        async def replace(self) -> None:
            self.here.set()
            await super().replace()

    log = Stuck()
    async with spooling(tmp_path, log) as (event_writer, _), asyncio.timeout(WAIT):
        await event_writer.append(COMPLETIONS, "s1", b"call")
        await event_writer.wait_drained()
    assert (log.replaced, log.values) == (1, [b"call"])


async def test_a_disk_that_fails_is_no_acknowledgement(tmp_path: Path) -> None:
    async with spooling(tmp_path, Log()) as (event_writer, spool):
        spool._file._db.execute("DROP TABLE spooled")
        with pytest.raises(NotAcknowledgedError, match="disk"):
            await event_writer.append(COMPLETIONS, "s1", b"call")
        assert (spool.used, spool.records) == (0, 0)
        spool._file._db.execute("CREATE TABLE spooled (number, topic, key, value, refused)")


def test_two_processes_never_share_a_file_and_a_freed_one_is_found_again(tmp_path: Path) -> None:
    one, two = open_spool_store(tmp_path, "t."), open_spool_store(tmp_path, "t.")
    assert [one.path.name, two.path.name] == ["t.0.sqlite", "t.1.sqlite"]
    one.add([SpooledRecord("completions", "s1", b"x")])
    one.close()
    again = open_spool_store(tmp_path, "t.")
    assert (again.path, [record.value for record in again.first(10)[0]]) == (one.path, [b"x"])
    again.close()
    two.close()


def test_a_directory_that_cannot_be_used_is_told_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="ROLLMILL_SPOOL_DIR"):
        open_spool_store(tmp_path / "file", "t.")
