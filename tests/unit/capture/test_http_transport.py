"""The connection to an upstream: how bodies end, what is kept, what breaks, and how each is told to httpx."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from rollmill_capture.upstream.http_transport import HIGH_WATER, BrokenResponseError, HttpTransport

WAIT = 5.0
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def client(serve: Serve) -> AsyncIterator[tuple[httpx.AsyncClient, list[int]]]:
    """A client with one connection at a time, and the number of connections that were made."""
    connections: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            return
        finally:
            writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        transport = HttpTransport(ssl.create_default_context())
        async with asyncio.timeout(WAIT), httpx.AsyncClient(base_url=base, transport=transport, timeout=WAIT) as http:
            yield http, connections


def answering(*answers: bytes, ends: bool = False) -> Serve:
    """Each request gets the next answer on the same connection; ``ends``: then the server closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"ontent-length: 4" in head.replace(b"C", b"c"):
                assert await reader.readexactly(4) == b"body"
            writer.write(answer)
            await writer.drain()
        if not ends:
            await reader.read()

    return serve


SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Two: a\r\nX-Two: b\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"


async def test_a_connection_is_kept_for_the_next_call() -> None:
    async with client(answering(SIZED, CHUNKED, SIZED)) as (http, connections):
        answers = [await http.post("/v1/x?y=1", content=b"body") for _ in range(3)]
    assert [answer.content for answer in answers] == [b"hello"] * 3
    assert answers[0].headers.get_list("x-two") == ["a", "b"]
    assert len(connections) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
async def test_a_body_may_end_with_its_connection_which_is_not_used_again(answer: bytes) -> None:
    async with client(answering(answer, ends=True)) as (http, connections):
        for _ in range(2):
            assert (await http.get("/")).content == b"hello"
    assert len(connections) == 2


async def test_continue_is_no_answer() -> None:
    async with client(answering(b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED)) as (http, _):
        answer = await http.get("/")
    assert (answer.status_code, answer.content) == (200, b"hello")


async def test_an_answer_without_a_body_keeps_the_connection() -> None:
    async with client(answering(b"HTTP/1.1 204 No Content\r\n\r\n", SIZED)) as (http, connections):
        assert (await http.get("/")).status_code == 204
        assert (await http.get("/")).content == b"hello"
    assert len(connections) == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello",
        CHUNKED[:-7],
        b"SSH-2.0-OpenSSH_9\r\n\r\n",
    ],
)
async def test_an_answer_that_breaks_off_or_is_none_is_told(answer: bytes) -> None:
    async with client(answering(answer, ends=True)) as (http, _):
        with pytest.raises(BrokenResponseError):
            await http.get("/")


async def test_a_kept_connection_that_ends_without_a_byte_was_stale_and_may_be_replaced() -> None:
    async with client(answering(SIZED, b"", ends=True)) as (http, _):
        await http.get("/")
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("/")


async def test_a_kept_connection_that_ends_after_its_first_byte_was_not() -> None:
    async with client(answering(SIZED, b"H", ends=True)) as (http, _):
        await http.get("/")
        with pytest.raises(BrokenResponseError):
            await http.get("/")


async def test_what_arrives_is_handed_over_at_once_and_what_arrived_together_together() -> None:
    goes_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n")
        await goes_on.wait()
        writer.write(b"1\r\nc\r\n0\r\n\r\n")
        await reader.read()

    async with client(serve) as (http, _), http.stream("GET", "/") as answer:
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"ab"
        goes_on.set()
        assert [piece async for piece in pieces] == [b"c"]


async def test_leaving_early_closes_the_connection_upstream() -> None:
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        try:
            await reader.read()
        finally:
            gone.set()

    async with client(serve) as (http, _):
        async with http.stream("GET", "/"):
            pass
        await gone.wait()


async def test_silence_and_refused_connections_are_told_as_what_they_are() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with client(serve) as (http, _):
        with pytest.raises(httpx.ReadTimeout):
            await http.get("/", timeout=httpx.Timeout(WAIT, read=0.05))  # connecting may take as long as it takes
        port = http.base_url.port
    async with httpx.AsyncClient(transport=HttpTransport(ssl.create_default_context())) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"http://127.0.0.1:{port}/")


async def test_a_reply_that_nobody_takes_is_not_read_without_end() -> None:
    size = 64 * HIGH_WATER
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size // HIGH_WATER):
            writer.write(bytes(HIGH_WATER))
            await writer.drain()
            sent += HIGH_WATER
        await reader.read()

    async with client(serve) as (http, _), http.stream("GET", "/") as answer:
        for _ in range(200):
            await asyncio.sleep(0)
        assert sent < size // 2
        taken = [len(piece) async for piece in answer.aiter_bytes()]
    assert sum(taken) == size
