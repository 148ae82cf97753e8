"""The load: groups of sessions in a steady stream. An agent asks again until it is answered, and notes what it saw."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from chaos.dialogue import TURNS, Dialogue

GROUP_SIZE = 4
STREAM_EVERY = 3
RETRY_SECONDS = 0.3
GIVE_UP_SECONDS = 150.0
CALL_SECONDS = 45.0
REFUSED = 400


class LoadError(Exception):
    """An agent was never answered, or was told something else than the engine said."""


@dataclass
class Seen:
    """What one agent saw: its own record, independent of what anybody captured."""

    dialogue: Dialogue
    answered: int = 0
    """Turns whose replies came back to their end."""
    failures: Counter[int] = field(default_factory=Counter)
    """Calls by turn that broke off: nobody knows whether they are captured."""
    closed: bool = False


@dataclass
class Load:
    """Starts a group every ``pause`` seconds until `stop`, ``at_once`` groups at most."""

    url: str
    tag: str
    pause: float = 0.6
    at_once: int = 8
    seen: dict[str, Seen] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """Open no more groups; those that are open go on to their end."""
        self._stop.set()

    async def run(self) -> None:
        places = asyncio.Semaphore(self.at_once)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=CALL_SECONDS, limits=limits) as http, asyncio.TaskGroup() as groups:
            number = 0
            while not self._stop.is_set():
                await places.acquire()
                groups.create_task(self._group(http, number, places))
                number += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self.pause)

    async def _group(self, http: httpx.AsyncClient, number: int, places: asyncio.Semaphore) -> None:
        group = f"{self.tag}g{number}"
        dialogues = [Dialogue(f"{group}m{member}", group, member) for member in range(GROUP_SIZE)]
        try:
            await asyncio.gather(*(self._session(http, dialogue) for dialogue in dialogues))
        finally:
            places.release()

    async def _session(self, http: httpx.AsyncClient, dialogue: Dialogue) -> None:
        seen = self.seen[dialogue.session_id] = Seen(dialogue)
        try:
            await Agent(http, self.url, seen).run()
        except LoadError as error:
            self.complaints.append(f"{dialogue.session_id}: {error}")


@dataclass
class Agent:
    """Plays one session."""

    http: httpx.AsyncClient
    url: str
    seen: Seen

    async def run(self) -> None:
        dialogue = self.seen.dialogue
        spec = {
            "session_id": dialogue.session_id,
            "group_id": dialogue.group_id,
            "group_size": GROUP_SIZE,
            "evaluators": [{"strategy": "reported"}],
        }
        await self._until_done("/v1/sessions", spec)
        for turn in range(TURNS):
            await self._turn(turn)
            self.seen.answered = turn + 1
        await self._until_done(f"/v1/sessions/{dialogue.session_id}/close", {"reward": dialogue.reward})
        self.seen.closed = True

    async def _until_done(self, path: str, body: dict[str, Any]) -> None:
        end = time.monotonic() + GIVE_UP_SECONDS
        while (why := await self._posted(path, body)) is not None:
            if time.monotonic() > end:
                raise LoadError(f"{path}: {why}")
            await asyncio.sleep(RETRY_SECONDS)

    async def _posted(self, path: str, body: dict[str, Any]) -> str | None:
        """None where it was done."""
        try:
            answer = await self.http.post(self.url + path, json=body)
        except httpx.HTTPError as error:
            return repr(error)
        return None if answer.status_code < REFUSED else answer.text

    async def _turn(self, turn: int) -> None:
        end = time.monotonic() + GIVE_UP_SECONDS
        wanted = self.seen.dialogue.replies[turn]
        while (text := await self._asked(turn)) is None:
            self.seen.failures[turn] += 1
            if time.monotonic() > end:
                raise LoadError(f"turn {turn} is never answered")
            await asyncio.sleep(RETRY_SECONDS)
        if text != wanted:
            raise LoadError(f"turn {turn}: {text!r} instead of {wanted!r}")

    async def _asked(self, turn: int) -> str | None:
        """The reply, whole; None where the call broke off or was refused."""
        dialogue = self.seen.dialogue
        stream = (dialogue.member + turn) % STREAM_EVERY == 0
        body = {"model": "toy", "messages": dialogue.messages(turn), "stream": stream}
        url = f"{self.url}/sessions/{dialogue.session_id}/v1/chat/completions"
        try:
            async with self.http.stream("POST", url, json=body) as answer:
                if answer.status_code >= REFUSED:
                    return None
                return await _streamed(answer) if stream else _whole(await answer.aread())
        except (httpx.HTTPError, orjson.JSONDecodeError, KeyError):
            return None


def _whole(raw: bytes) -> str | None:
    text: str | None = orjson.loads(raw)["choices"][0]["message"]["content"]
    return text


async def _streamed(answer: httpx.Response) -> str | None:
    text, finished = "", False
    async for data in _events(answer):
        if data == "[DONE]":
            break
        for choice in orjson.loads(data).get("choices", ()):
            text += choice["delta"].get("content") or ""
            finished = finished or choice.get("finish_reason") is not None
    return text if finished else None


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()
