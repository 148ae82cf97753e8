"""The agents: sessions of three turns by the stock `openai` client, in groups that relay the same digits.

An agent knows a base URL and nothing of what lies behind it. It keeps a record of its own, a `Transcript`, of what it
asked and read; that record owes nothing to what anybody captured.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, cast

import httpx
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError
from openai.types.chat import ChatCompletionMessageParam

from relay.chat_wire import MODEL_NAME
from relay.sabotage import Sabotage, spoiled_group
from relay.task import Message, group_digits, group_id, is_right, question, reward

Tool = Callable[[int, str], Awaitable[Message]]
"""Gives the message that opens a turn; may take its time."""


@dataclass(frozen=True)
class Session:
    """A session that somebody opened: what an agent needs of it is the base URL, and the key where one is asked for."""

    session_id: str
    base_url: str
    api_key: str = "none"


@dataclass(frozen=True)
class Turn:
    asked: str
    text: str
    finish_reason: str
    right: bool


@dataclass(frozen=True)
class Transcript:
    """An agent's own record. `group` is the group it truly belongs to; `error` is None where all went well."""

    session_id: str
    group: int
    member: int
    digits: str
    turns: tuple[Turn, ...]
    error: str | None = None

    @property
    def reward(self) -> float:
        return reward([turn.text for turn in self.turns], self.digits)


class Sessions(Protocol):
    """Opens and closes sessions: at a capture service, or nowhere at all."""

    async def open(self, group: str, digits: str) -> Session: ...

    async def close(self, session: Session, transcript: Transcript) -> None: ...


def make_client(http: DefaultAsyncHttpxClient | None = None) -> AsyncOpenAI:
    """The one client of all agents; sessions differ by `with_options(base_url=...)` and share its connections.

    It does not retry: a retried call would be sampled, and captured, twice.
    """
    return AsyncOpenAI(api_key="none", base_url="http://set-per-session.invalid", http_client=http, max_retries=0)


async def run_session(
    client: AsyncOpenAI, base_url: str, digits: str, tool: Tool, record: list[Turn], *, stream: bool = False
) -> None:
    """Plays the turns one after the other; `record` grows by each turn that ended, also when a later one fails."""
    model = client.with_options(base_url=base_url)
    messages: list[Message] = []
    for turn, digit in enumerate(digits):
        messages.append(await tool(turn, digit))
        text, finish_reason = await _reply(model, messages, stream=stream)
        record.append(Turn(messages[-1].content, text, finish_reason, is_right(text, digit)))
        messages.append(Message("assistant", text))


async def _reply(model: AsyncOpenAI, messages: list[Message], *, stream: bool) -> tuple[str, str]:
    """The text and the finish reason of the model's next reply."""
    wire = [_on_the_wire(message) for message in messages]
    if stream:
        return await _streamed(model, wire)
    answer = await model.chat.completions.create(model=MODEL_NAME, messages=wire)
    return answer.choices[0].message.content or "", answer.choices[0].finish_reason


async def _streamed(model: AsyncOpenAI, wire: list[ChatCompletionMessageParam]) -> tuple[str, str]:
    text, finish_reason = "", ""
    async with await model.chat.completions.create(model=MODEL_NAME, messages=wire, stream=True) as chunks:
        async for chunk in chunks:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish_reason = choice.finish_reason or finish_reason
    if not finish_reason:
        raise OpenAIError("the stream ended before the reply did")
    return text, finish_reason


def _on_the_wire(message: Message) -> ChatCompletionMessageParam:
    call = {"tool_call_id": "relay"} if message.role == "tool" else {}
    return cast("ChatCompletionMessageParam", {"role": message.role, "content": message.content, **call})


async def quick_tool(turn: int, digit: str) -> Message:
    return question(turn, digit)


@dataclass(frozen=True)
class Crew:
    """Runs whole groups. `tool_of(group, member)` chooses a member's tool, `record` receives every transcript."""

    client: AsyncOpenAI
    sessions: Sessions
    tool_of: Callable[[int, int], Tool]
    record: Callable[[Transcript], None]
    seed: int = 0
    group_size: int = 8
    stream_every: int = 4
    sabotage: Sabotage = Sabotage.NONE

    async def run_group(self, group: int) -> list[Transcript]:
        """All sessions of a group at once; a session that fails is recorded and does not stop the others."""
        return list(await asyncio.gather(*(self._run_member(group, member) for member in range(self.group_size))))

    async def _run_member(self, group: int, member: int) -> Transcript:
        digits = group_digits(self.seed, group)
        session = await self.sessions.open(group_id(spoiled_group(group, member, self.sabotage)), digits)
        turns: list[Turn] = []
        error = await self._attempt(session, digits, self.tool_of(group, member), turns, member)
        transcript = Transcript(session.session_id, group, member, digits, tuple(turns), error)
        self.record(transcript)
        await self.sessions.close(session, transcript)
        return transcript

    async def _attempt(self, session: Session, digits: str, tool: Tool, turns: list[Turn], member: int) -> str | None:
        stream = member % self.stream_every == 0
        client = self.client.with_options(api_key=session.api_key)
        try:
            await run_session(client, session.base_url, digits, tool, turns, stream=stream)
        except (OpenAIError, httpx.HTTPError) as error:
            return f"{type(error).__name__}: {error}"
        return None
