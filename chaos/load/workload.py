"""Groups of sessions in a steady stream. An agent repeats a request until it is answered, and records what it saw."""

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

from chaos.load.scripted_conversation import TURNS, ScriptedConversation

GROUP_SIZE = 4
STREAM_EVERY = 3
RETRY_SECONDS = 0.3
GIVE_UP_SECONDS = 150.0
CALL_SECONDS = 45.0
REFUSED = 400


class AgentError(Exception):
    """An agent was never answered, or got another reply than the engine gave."""


@dataclass
class AgentObservations:
    """What one agent saw, independent of what was captured."""

    conversation: ScriptedConversation
    answered: int = 0
    """Turns with a complete reply."""
    failures: Counter[int] = field(default_factory=Counter)
    """Failed calls by turn: they may or may not be captured."""
    closed: bool = False


@dataclass
class Workload:
    """Starts a group every ``pause`` seconds until `stop`; at most ``at_once`` groups are open."""

    url: str
    tag: str
    pause: float = 0.6
    at_once: int = 8
    agents: dict[str, AgentObservations] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """Open no more groups; those that are open continue to their end."""
        self._stop.set()

    async def run(self) -> None:
        open_groups = asyncio.Semaphore(self.at_once)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=CALL_SECONDS, limits=limits) as http, asyncio.TaskGroup() as groups:
            number = 0
            while not self._stop.is_set():
                await open_groups.acquire()
                groups.create_task(self._group(http, number, open_groups))
                number += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self.pause)

    async def _group(self, http: httpx.AsyncClient, number: int, open_groups: asyncio.Semaphore) -> None:
        group = f"{self.tag}g{number}"
        conversations = [ScriptedConversation(f"{group}m{member}", group, member) for member in range(GROUP_SIZE)]
        try:
            await asyncio.gather(*(self._session(http, conversation) for conversation in conversations))
        finally:
            open_groups.release()

    async def _session(self, http: httpx.AsyncClient, conversation: ScriptedConversation) -> None:
        seen = self.agents[conversation.session_id] = AgentObservations(conversation)
        try:
            await Agent(http, self.url, seen).run()
        except AgentError as error:
            self.complaints.append(f"{conversation.session_id}: {error}")


@dataclass
class Agent:
    """Plays one session."""

    http: httpx.AsyncClient
    url: str
    seen: AgentObservations

    async def run(self) -> None:
        conversation = self.seen.conversation
        spec = {
            "session_id": conversation.session_id,
            "group_id": conversation.group_id,
            "group_size": GROUP_SIZE,
            "evaluators": [{"strategy": "reported"}],
        }
        await self._post_until_accepted("/v1/sessions", spec)
        for turn in range(TURNS):
            await self._turn(turn)
            self.seen.answered = turn + 1
        await self._post_until_accepted(
            f"/v1/sessions/{conversation.session_id}/close", {"reward": conversation.reward}
        )
        self.seen.closed = True

    async def _post_until_accepted(self, path: str, body: dict[str, Any]) -> None:
        end = time.monotonic() + GIVE_UP_SECONDS
        while (why := await self._post(path, body)) is not None:
            if time.monotonic() > end:
                raise AgentError(f"{path}: {why}")
            await asyncio.sleep(RETRY_SECONDS)

    async def _post(self, path: str, body: dict[str, Any]) -> str | None:
        """None where it was accepted, else why not."""
        try:
            response = await self.http.post(self.url + path, json=body)
        except httpx.HTTPError as error:
            return repr(error)
        return None if response.status_code < REFUSED else response.text

    async def _turn(self, turn: int) -> None:
        end = time.monotonic() + GIVE_UP_SECONDS
        wanted = self.seen.conversation.replies[turn]
        while (text := await self._call(turn)) is None:
            self.seen.failures[turn] += 1
            if time.monotonic() > end:
                raise AgentError(f"turn {turn} is never answered")
            await asyncio.sleep(RETRY_SECONDS)
        if text != wanted:
            raise AgentError(f"turn {turn}: {text!r} instead of {wanted!r}")

    async def _call(self, turn: int) -> str | None:
        """The complete reply; None where the call failed or was refused."""
        conversation = self.seen.conversation
        stream = (conversation.member + turn) % STREAM_EVERY == 0
        body = {"model": "toy", "messages": conversation.messages(turn), "stream": stream}
        url = f"{self.url}/sessions/{conversation.session_id}/v1/chat/completions"
        try:
            async with self.http.stream("POST", url, json=body) as response:
                if response.status_code >= REFUSED:
                    return None
                return await _streamed_content(response) if stream else _content(await response.aread())
        except (httpx.HTTPError, orjson.JSONDecodeError, KeyError):
            return None


def _content(raw: bytes) -> str | None:
    text: str | None = orjson.loads(raw)["choices"][0]["message"]["content"]
    return text


async def _streamed_content(response: httpx.Response) -> str | None:
    text, finished = "", False
    async for data in _events(response):
        if data == "[DONE]":
            break
        for choice in orjson.loads(data).get("choices", ()):
            text += choice["delta"].get("content") or ""
            finished = finished or choice.get("finish_reason") is not None
    return text if finished else None


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()
