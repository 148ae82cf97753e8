"""What the disk does to the spool's file: altered rows are not sent, damaged files give what can be read of them."""

import asyncio
import random
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog
from structlog.typing import EventDict

from rollmill.codec import Headers
from rollmill.errors import ConfigurationError
from rollmill.runtime.telemetry.metrics import Metrics
from rollmill.topics import COMPLETIONS
from rollmill_capture.app import opened_spool
from rollmill_capture.event_log.event_writer import LogEventWriter, NotAcknowledgedError
from rollmill_capture.event_log.spool import Spool, SpoolFailedError, open_spool
from rollmill_capture.event_log.spool_drain import SpoolDrain
from rollmill_capture.event_log.spool_recovery import open_spool_store
from rollmill_capture.event_log.spooled_record import SpooledRecord
from rollmill_capture.settings import CaptureSettings

WAIT = 10.0
PAGE = 4096
RECORDS = 60
TOKEN = b"\x0b\x0d\x0c\x0e\x0a\x0f"
"""Token ids that no other bytes of a record look like."""
OLD_TABLE = """
CREATE TABLE IF NOT EXISTS spooled (number INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, key TEXT NOT NULL,
value BLOB NOT NULL, refused TEXT)
"""
"""As release 0.1.0 makes it."""


@dataclass
class Log:
    sent: list[tuple[str, str, bytes]] = field(default_factory=list)

    async def send(self, topic: str, key: str, value: bytes | None, headers: Headers = ()) -> None:
        del headers
        self.sent.append((topic, key, value or b""))

    async def send_all(self, records: Sequence[tuple[str, str, bytes]]) -> None:
        self.sent.extend(records)

    async def is_reachable(self) -> bool:
        return True

    async def replace(self) -> None: ...


@dataclass(frozen=True)
class Started:
    """A capture's event writer that has sent what it found."""

    log: Log
    spool: Spool
    metrics: Metrics
    logged: list[EventDict]

    @property
    def values(self) -> list[bytes]:
        return [value for _, _, value in self.log.sent]

    def metric(self, name: str) -> float:
        lines = self.metrics.exposition().decode().splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(f"rollmill_{name}")))


@asynccontextmanager
async def starting(directory: Path) -> AsyncIterator[Started]:
    with structlog.testing.capture_logs() as logged:
        spool = await open_spool(directory, "t.", 2**30)
        writer = LogEventWriter(Log(), spool, Metrics("capture"))
        draining = asyncio.create_task(SpoolDrain(writer).run())
        try:
            async with asyncio.timeout(WAIT):
                assert await writer.wait_drained()
            yield Started(writer.producer, spool, writer.metrics, logged)  # type: ignore[arg-type]
        finally:
            draining.cancel()
            await asyncio.wait((draining,))
            await spool.close()


def _value(number: int) -> bytes:
    """Some are larger than a page, so that they have overflow pages."""
    return b"%06d" % number + TOKEN + bytes([number % 251]) * (30 if number % 3 else 9000)


def _spooled(directory: Path, records: int = RECORDS) -> list[bytes]:
    values = [_value(number) for number in range(records)]
    store = open_spool_store(directory, "t.")
    for number, value in enumerate(values):
        store.add([SpooledRecord("completions", f"s{number % 4}", value)])
    store.close()
    return values


def _alter(directory: Path, change: Callable[[bytearray], None]) -> None:
    path = directory / "t.0.sqlite"
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def _flip_token(number: int) -> Callable[[bytearray], None]:
    def change(content: bytearray) -> None:
        at = content.index(b"%06d" % number + TOKEN)
        content[at + 8] ^= 1

    return change


def _pages(content: bytes | bytearray, first: int) -> list[int]:
    """Offsets of the pages whose first byte is ``first``."""
    return [at for at in range(PAGE, len(content), PAGE) if content[at] == first]


def _without_index(content: bytearray) -> None:
    for at in _pages(content, 0x05):
        content[at : at + PAGE] = bytes(PAGE)


async def test_f14_a_record_whose_token_id_was_altered_on_the_disk_is_not_sent_and_counted(tmp_path: Path) -> None:
    values = _spooled(tmp_path)
    _alter(tmp_path, _flip_token(7))
    async with starting(tmp_path) as started:
        assert started.values == values[:7] + values[8:]
        assert (started.metric("spool_damaged_records"), started.metric("spool_damaged_files")) == (1, 0)
        [line] = [line for line in started.logged if line.get("session")]
        assert (line["log_level"], line["session"], line["number"]) == ("error", "s3", 8)
        assert started.spool.used == 0
    async with starting(tmp_path) as again:
        assert (again.values, again.metric("spool_damaged_records")) == ([], 1)


async def test_f14_an_altered_session_id_topic_or_number_is_found_as_well(tmp_path: Path) -> None:
    values = _spooled(tmp_path)

    def change(content: bytearray) -> None:
        content[content.index(b"s1" + _value(5)[:6])] = 0xFF  # no UTF-8 any more
        content[content.index(b"completionss2" + _value(10)[:6])] ^= 4

    _alter(tmp_path, change)
    async with starting(tmp_path) as started:
        assert started.values == [value for value in values if value not in {_value(5), _value(10)}]
        assert started.metric("spool_damaged_records") == 2
        assert not any(started.spool.holds(f"s{number}") for number in range(4))


@pytest.mark.parametrize("first", [bytes(PAGE), b"\xff" * PAGE, b"SQLite format 3\x00" + bytes(PAGE - 16)])
async def test_f14_a_damaged_first_page_costs_nothing_of_what_is_behind_it(tmp_path: Path, first: bytes) -> None:
    values = _spooled(tmp_path)
    _alter(tmp_path, lambda content: content.__setitem__(slice(0, PAGE), first))
    async with starting(tmp_path) as started:
        assert started.values == values
        _assert_alarmed(started, tmp_path, saved=RECORDS)


async def test_f14_a_damaged_page_in_the_middle_costs_its_own_records(tmp_path: Path) -> None:
    values = _spooled(tmp_path)
    lost = list[bytes]()

    def change(content: bytearray) -> None:
        leaf = _pages(content, 0x0D)[3]
        page = bytes(content[leaf : leaf + PAGE])
        lost.extend(value for value in values if value[:12] in page)
        content[leaf : leaf + PAGE] = bytes(PAGE)

    _alter(tmp_path, change)
    async with starting(tmp_path) as started:
        assert 0 < len(lost) < RECORDS
        assert started.values == [value for value in values if value not in lost]
        _assert_alarmed(started, tmp_path, saved=RECORDS - len(lost))


async def test_f14_the_index_pages_are_not_needed(tmp_path: Path) -> None:
    values = _spooled(tmp_path)
    _alter(tmp_path, _without_index)
    async with starting(tmp_path) as started:
        assert started.values == values


@pytest.mark.parametrize("kept", [0.5, 0.9])
async def test_f14_a_truncated_file_gives_the_records_that_are_whole(tmp_path: Path, kept: float) -> None:
    values = _spooled(tmp_path)
    _alter(tmp_path, lambda content: content.__delitem__(slice(int(len(content) * kept), None)))
    async with starting(tmp_path) as started:
        assert 10 < len(started.values) < RECORDS
        assert started.values == [value for value in values if value in started.values]
        _assert_alarmed(started, tmp_path, saved=len(started.values))


async def test_f14_an_emptied_file_is_alarmed(tmp_path: Path) -> None:
    _spooled(tmp_path)
    _alter(tmp_path, lambda content: content.clear())
    async with starting(tmp_path) as started:
        _assert_alarmed(started, tmp_path, saved=0)


async def test_f14_a_new_record_goes_behind_those_that_were_saved_and_the_next_start_is_a_usual_one(
    tmp_path: Path,
) -> None:
    _spooled(tmp_path)
    _alter(tmp_path, lambda content: content.__setitem__(slice(0, PAGE), bytes(PAGE)))
    async with starting(tmp_path) as started:
        await started.spool.put(SpooledRecord("completions", "s1", b"later"))
        assert [record.number for record in await started.spool.first(100)] == [RECORDS + 1]
    async with starting(tmp_path) as again:
        assert again.values == [b"later"]
        assert (again.metric("spool_damaged_files"), again.metric("spool_saved_records")) == (1, 0)
        assert not [line for line in again.logged if line["log_level"] == "error"]


async def test_f14_damage_while_capture_runs_costs_neither_the_drain_nor_the_records_that_come(tmp_path: Path) -> None:
    values = _spooled(tmp_path)
    spool = await open_spool(tmp_path, "t.", 2**30)
    _alter(tmp_path, _without_index)
    spool._file._db.execute("PRAGMA cache_size = 0")
    await asyncio.gather(*(spool.put(SpooledRecord("completions", "new", b"%d" % number)) for number in range(5)))
    found = await spool.first(2**20)
    assert [record.value for record in found] == [*values, *(b"%d" % number for number in range(5))]
    assert (spool.records, spool.damage.saved) == (RECORDS + 5, RECORDS)
    await spool.remove(found)
    assert (spool.records, spool.used, spool.empty.is_set()) == (0, 0, True)
    await spool.close()


async def test_f14_no_bit_of_the_file_stops_capture_or_alters_what_is_sent(tmp_path: Path) -> None:
    """One bit of each kind of place: header, root, leaf, overflow page."""
    values = _spooled(tmp_path, 12)
    whole = (tmp_path / "t.0.sqlite").read_bytes()
    chance = random.Random(14)  # noqa: S311  # the same places in every run
    places = [*range(16, 100, 2), *(chance.randrange(100, len(whole)) for _ in range(120))]
    for number, place in enumerate(places):
        directory = tmp_path / str(number)
        directory.mkdir()
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        (directory / "t.0.sqlite").write_bytes(damaged)
        async with starting(directory) as started:
            sent = started.values
            assert sent == [value for value in values if value in sent], place
            missing = len(values) - len(sent)
            alarmed = started.metric("spool_damaged_records") + started.metric("spool_damaged_files")
            assert not missing or alarmed, (place, missing)


async def test_f14_a_spool_of_release_0_1_0_is_read_and_it_reads_ours(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "t.0.sqlite", isolation_level=None) as old:
        old.execute("PRAGMA journal_mode = WAL")
        old.execute(OLD_TABLE)
        old.execute("INSERT INTO spooled (topic, key, value) VALUES ('completions', 's1', x'01')")
    old.close()
    store = open_spool_store(tmp_path, "t.")
    store.add([SpooledRecord("completions", "s1", b"\x02")])
    assert [record.value for record in store.first(100)[0]] == [b"\x01", b"\x02"]
    store.close()
    with sqlite3.connect(tmp_path / "t.0.sqlite", isolation_level=None) as old:
        old.execute("PRAGMA journal_mode = WAL")
        old.execute(OLD_TABLE)
        rows = old.execute("SELECT value, number FROM spooled WHERE refused IS NULL ORDER BY number").fetchall()
        old.execute("INSERT INTO spooled (topic, key, value) VALUES ('completions', 's1', x'03')")
    old.close()
    assert rows == [(b"\x01", 1), (b"\x02", 2)]
    async with starting(tmp_path) as started:
        assert started.values == [b"\x01", b"\x02", b"\x03"]


async def test_f14_rows_of_release_0_1_0_are_saved_too(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "t.0.sqlite", isolation_level=None) as old:
        old.execute(OLD_TABLE)
        old.execute("INSERT INTO spooled (topic, key, value) VALUES ('completions', 's1', ?)", [bytes(20_000)])
    old.close()
    _alter(tmp_path, lambda content: content.__setitem__(slice(0, PAGE), bytes(PAGE)))
    async with starting(tmp_path) as started:
        assert started.values == [bytes(20_000)]


async def test_f14_a_crash_between_the_two_names_of_a_replaced_file_loses_nothing(tmp_path: Path) -> None:
    values = _spooled(tmp_path, 3)
    (tmp_path / "t.0.sqlite").rename(tmp_path / "t.0.new")
    async with starting(tmp_path) as started:
        assert started.values == values


async def test_f14_a_full_disk_refuses_the_record_and_nothing_of_it_is_there(tmp_path: Path) -> None:
    spool = await open_spool(tmp_path, "t.", 2**30)
    await spool.put(SpooledRecord("completions", "s1", b"first"))
    writer = LogEventWriter(Log(), spool, Metrics("capture"), away=True)
    spool._file._db.execute("PRAGMA max_page_count = 8")
    large = [SpooledRecord("completions", "s2", bytes(9000)) for _ in range(4)]
    with pytest.raises(NotAcknowledgedError, match="full"):
        await writer.append(COMPLETIONS, "s2", bytes(40_000))
    results = await asyncio.gather(*(spool.put(record) for record in large), return_exceptions=True)
    assert [record.value for record in await spool.first(2**20)][:1] == [b"first"]
    kept = sum(not isinstance(result, BaseException) for result in results)
    assert (spool.records, spool.used) == (1 + kept, 5 + 9000 * kept)
    spool._file._db.execute("PRAGMA max_page_count = 1000")
    await writer.append(COMPLETIONS, "s2", bytes(40_000))
    found = await spool.first(2**20)
    assert [len(record.value) for record in found] == [5, *[9000] * kept, 40_000]
    await spool.close()


async def test_f14_a_disk_that_fails_to_remove_what_was_sent_does_not_have_it_sent_again_and_again(
    tmp_path: Path,
) -> None:
    _spooled(tmp_path, 2)
    spool, log = await open_spool(tmp_path, "t.", 2**30), Log()
    drain = SpoolDrain(LogEventWriter(log, spool, Metrics("capture")))
    spool._file._db.execute("PRAGMA query_only = 1")
    for _ in range(2):
        with pytest.raises(SpoolFailedError, match="readonly"):
            await drain._step()
    running = asyncio.create_task(drain.run())
    await asyncio.wait((running,), timeout=0.05)
    assert not running.done()
    running.cancel()
    spool._file._db.execute("PRAGMA query_only = 0")
    await drain._step()
    assert [value for _, _, value in log.sent] == [_value(0), _value(1)]
    assert (spool.records, spool.used) == (0, 0)
    await spool.close()


async def test_f14_a_directory_that_is_no_spool_is_still_a_matter_of_configuration(tmp_path: Path) -> None:
    (tmp_path / "t.0.sqlite").mkdir()
    with pytest.raises(ConfigurationError, match="ROLLMILL_SPOOL_DIR"):
        async with opened_spool(CaptureSettings(spool_dir=tmp_path, prefix="t.")):
            raise AssertionError("a directory is no file")


def _assert_alarmed(started: Started, directory: Path, saved: int) -> None:
    [line] = [line for line in started.logged if line["log_level"] == "error"]
    assert line["records_saved"] == saved
    assert "others may be lost" in line["event"]
    assert Path(line["kept"]).parent == directory
    assert Path(line["kept"]).exists()
    assert started.metric("spool_damaged_files") == 1
    assert started.metric("spool_saved_records") == saved
