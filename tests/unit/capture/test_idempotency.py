"""What idempotency keeps in memory: bounded, whatever else is going on."""

import asyncio
from typing import Any

from rollmill.runtime.telemetry.metrics import Metrics
from rollmill_capture.http.idempotency import Idempotency
from rollmill_capture.proxy.response_stream import SETTLED

PIECES = 50


async def asked(
    idempotency: Idempotency, app: Any, key: bytes, *body: bytes, path: str = "/v1/messages"
) -> list[dict[str, Any]]:
    """One request with an idempotency key, its body in pieces; the messages that the client got."""
    got: list[dict[str, Any]] = []
    pieces = list(body) or [b""]

    async def send(message: Any) -> None:
        got.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    scope = {"type": "http", "headers": [], "path": path}
    await idempotency.enter(("s:1", key), app, scope, receive, send)
    return got


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    while (await receive())["more_body"]:
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(PIECES):
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
    scope[SETTLED] = True


async def failing(*_: Any) -> None:
    """Ends without a reply that may be played again."""


async def test_a_call_that_runs_for_long_does_not_keep_the_replies_that_came_after_it() -> None:
    idempotency, running, ended = (
        Idempotency(Metrics("capture"), max_bytes=10 * PIECES),
        asyncio.Event(),
        asyncio.Event(),
    )

    async def slow(*_: Any) -> None:
        running.set()
        await ended.wait()

    first = asyncio.create_task(asked(idempotency, slow, b"slow"))
    await running.wait()
    for number in range(100):
        await asked(idempotency, streaming, b"%d" % number)
    assert len(idempotency._known) == 11
    assert idempotency._kept_bytes == 10 * PIECES
    ended.set()
    await first


async def test_a_stream_is_kept_as_one_piece_and_played_again_as_it_was() -> None:
    idempotency = Idempotency(Metrics("capture"))
    first = await asked(idempotency, streaming, b"k")
    again = await asked(idempotency, failing, b"k")
    assert len(first) == PIECES + 2
    assert [message["type"] for message in again] == ["http.response.start", "http.response.body"]
    assert again[1]["body"] == b"".join(message.get("body", b"") for message in first)


async def test_keys_of_failed_calls_are_bounded_too(monkeypatch: Any) -> None:
    monkeypatch.setattr("rollmill_capture.http.idempotency.MOST_KEYS", 20)
    idempotency = Idempotency(Metrics("capture"))
    for number in range(100):
        await asked(idempotency, failing, b"%d" % number)
    assert len(idempotency._known) == len(idempotency._ended) == 20


async def test_what_is_made_again_is_counted_once() -> None:
    now = 0.0
    idempotency = Idempotency(Metrics("capture"), seconds=10.0, now=lambda: now)
    for _ in range(3):
        await asked(idempotency, streaming, b"k")
        now += 20.0
    assert idempotency._kept_bytes == PIECES


async def test_one_key_for_two_questions_is_refused_and_no_reply_is_given_to_another_question() -> None:
    idempotency = Idempotency(Metrics("capture"))
    first = await asked(idempotency, streaming, b"k", b'{"a":', b"1}")
    assert (await asked(idempotency, failing, b"k", b'{"a":1', b"}"))[-1]["body"] == b"x" * PIECES
    for body, path in ((b'{"a":2}', "/v1/messages"), (b'{"a":1}', "/v1/responses")):
        start, end = await asked(idempotency, failing, b"k", body, path=path)
        assert start["status"] == 422
        assert b"every call has a key of its own" in end["body"]
    assert first[0]["status"] == 200
