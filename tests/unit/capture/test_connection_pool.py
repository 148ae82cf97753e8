"""Connections to the engine: reused, limited, and replaced when the engine has closed them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx
import pytest

from rollmill_capture.model_config import Route
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Target, Upstream, make_client
from rollmill_capture.upstream.http_transport import PooledTransport

WAIT = 5.0
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Body(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"{}"


@dataclass
class FakeConnection(httpx.AsyncBaseTransport):
    """Counts its calls; raises `failure` where it is set."""

    calls: int = 0
    closed: bool = False
    failure: BaseException | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        return httpx.Response(200, stream=Body(), request=request)

    async def aclose(self) -> None:
        self.closed = True


@dataclass
class Pool:
    limit: int = 2
    idle_seconds: float = 60.0
    made: list[FakeConnection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.transport = PooledTransport(self._make, max_connections=self.limit, idle_seconds=self.idle_seconds)

    def _make(self) -> FakeConnection:
        self.made.append(FakeConnection())
        return self.made[-1]

    async def begin(self, url: str = "http://engine/") -> httpx.Response:
        return await asyncio.wait_for(self.transport.handle_async_request(httpx.Request("GET", url)), WAIT)


async def test_a_connection_is_used_again_once_its_body_is_closed() -> None:
    pool = Pool()
    for _ in range(3):
        await (await pool.begin()).aclose()
    assert [connection.calls for connection in pool.made] == [3]


async def test_calls_at_once_and_other_hosts_have_connections_of_their_own() -> None:
    pool = Pool(limit=3)
    answers = [await pool.begin(), await pool.begin(), await pool.begin("http://other/")]
    assert [connection.calls for connection in pool.made] == [1, 1, 1]
    for answer in answers:
        await answer.aclose()
    await pool.transport.aclose()
    assert all(connection.closed for connection in pool.made)


async def test_a_call_beyond_the_limit_waits_for_a_connection() -> None:
    pool = Pool(limit=1)
    first = await pool.begin()
    second = asyncio.create_task(pool.begin())
    await asyncio.sleep(0)
    assert not second.done()
    await first.aclose()
    await (await second).aclose()
    assert [connection.calls for connection in pool.made] == [2]


@pytest.mark.parametrize("failure", [httpx.ReadError("reset"), asyncio.CancelledError()])
async def test_a_failed_call_releases_its_connection(failure: BaseException) -> None:
    pool = Pool(limit=1)
    await (await pool.begin()).aclose()
    pool.made[0].failure = failure
    with pytest.raises(type(failure)):
        await pool.begin()
    pool.made[0].failure = None
    await (await pool.begin()).aclose()


async def test_connections_that_are_no_longer_needed_are_closed() -> None:
    pool = Pool(idle_seconds=0.0)
    both = [await pool.begin(), await pool.begin()]
    for answer in both:
        await answer.aclose()
    assert [connection.closed for connection in pool.made] == [True, False]


@asynccontextmanager
async def engine_that_hangs_up() -> AsyncIterator[tuple[Target, list[int]]]:
    """Answers the first call of a connection and hangs up in the face of the second."""
    calls: list[int] = []
    serving: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        calls.append(1)
        writer.write(ANSWER)
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"{}")
        writer.close()
        await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.create_task(serve(reader, writer)))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield Target(Route(), f"http://127.0.0.1:{port}/v1", None), calls
    await asyncio.wait_for(asyncio.gather(*serving), WAIT)


async def test_a_call_on_a_connection_that_the_engine_gives_up_is_made_again() -> None:
    async with engine_that_hangs_up() as (target, calls), make_client(CaptureSettings()) as client:
        for _ in range(2):
            async with asyncio.timeout(WAIT), Upstream(client).chat(target, b"{}", "id") as response:
                assert await response.aread() == b"{}"
    assert len(calls) == 2
