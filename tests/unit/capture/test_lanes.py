"""Connections to the engine: reused, limited, and replaced when the engine has closed them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx
import pytest

from rollmill_capture.model_config import Route
from rollmill_capture.settings import CaptureSettings
from rollmill_capture.upstream.client import Upstream, make_client
from rollmill_capture.upstream.connection_pool import PooledTransport
from rollmill_capture.upstream.model_routes import Target

WAIT = 5.0
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


class Body(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"{}"


@dataclass
class Lane(httpx.AsyncBaseTransport):
    """Counts its calls; fails where it is told to."""

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
class Lanes:
    limit: int = 2
    idle_seconds: float = 60.0
    made: list[Lane] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.transport = PooledTransport(self._make, lanes=self.limit, idle_seconds=self.idle_seconds)

    def _make(self) -> Lane:
        self.made.append(Lane())
        return self.made[-1]

    async def begin(self, url: str = "http://engine/") -> httpx.Response:
        return await asyncio.wait_for(self.transport.handle_async_request(httpx.Request("GET", url)), WAIT)


async def test_a_lane_is_used_again_once_its_body_is_closed() -> None:
    lanes = Lanes()
    for _ in range(3):
        await (await lanes.begin()).aclose()
    assert [lane.calls for lane in lanes.made] == [3]


async def test_calls_at_once_and_other_hosts_have_lanes_of_their_own() -> None:
    lanes = Lanes(limit=3)
    answers = [await lanes.begin(), await lanes.begin(), await lanes.begin("http://other/")]
    assert [lane.calls for lane in lanes.made] == [1, 1, 1]
    for answer in answers:
        await answer.aclose()
    await lanes.transport.aclose()
    assert all(lane.closed for lane in lanes.made)


async def test_a_call_beyond_the_limit_waits_for_a_lane() -> None:
    lanes = Lanes(limit=1)
    first = await lanes.begin()
    second = asyncio.create_task(lanes.begin())
    await asyncio.sleep(0)
    assert not second.done()
    await first.aclose()
    await (await second).aclose()
    assert [lane.calls for lane in lanes.made] == [2]


@pytest.mark.parametrize("failure", [httpx.ReadError("reset"), asyncio.CancelledError()])
async def test_a_failed_call_leaves_its_lane(failure: BaseException) -> None:
    lanes = Lanes(limit=1)
    await (await lanes.begin()).aclose()
    lanes.made[0].failure = failure
    with pytest.raises(type(failure)):
        await lanes.begin()
    lanes.made[0].failure = None
    await (await lanes.begin()).aclose()


async def test_lanes_that_nobody_needs_any_more_are_closed() -> None:
    lanes = Lanes(idle_seconds=0.0)
    both = [await lanes.begin(), await lanes.begin()]
    for answer in both:
        await answer.aclose()
    assert [lane.closed for lane in lanes.made] == [True, False]


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
