import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import httpx2
import pytest
import torch
from openai import DefaultAsyncHttpxClient

from relay.agents import Crew, Session, Tool, Transcript, make_client, quick_tool
from relay.engine import create_app
from relay.microbatch import Engine
from relay.model import RelayModel, to_bytes
from relay.pacing import EngineVersions, SlowTool, is_slow, run_groups, tools, unless_stopped
from relay.sabotage import Sabotage
from relay.task import group_digits, group_id


@dataclass
class DirectSessions:
    """Sessions straight at the engine."""

    base_url: str = "http://engine/v1"
    api_key: str = "none"
    groups: list[str] = field(default_factory=list)
    closed: list[Transcript] = field(default_factory=list)

    async def open(self, group: str, digits: str) -> Session:
        assert len(digits) == 3
        self.groups.append(group)
        return Session(f"s-{len(self.groups)}", self.base_url, self.api_key)

    async def close(self, session: Session, transcript: Transcript) -> None:
        assert session.session_id == transcript.session_id
        self.closed.append(transcript)


@dataclass(frozen=True)
class World:
    engine: Engine
    versions: EngineVersions
    crew: Crew
    sessions: DirectSessions
    record: list[Transcript]

    async def publish(self, version: int) -> None:
        await self.engine.load(to_bytes(RelayModel().state_dict()), version)


def always_quick(_group: int, _member: int) -> Tool:
    return quick_tool


@asynccontextmanager
async def world(base_url: str = "http://engine/v1", sabotage: Sabotage = Sabotage.NONE) -> AsyncIterator[World]:
    torch.manual_seed(1)
    async with Engine(RelayModel()) as engine:
        app = create_app(engine)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")
        sessions, record = DirectSessions(base_url), list[Transcript]()
        async with http, make_client(DefaultAsyncHttpxClient(transport=httpx2.ASGITransport(app))) as client:
            crew = Crew(client, sessions, always_quick, record.append, seed=4, sabotage=sabotage)
            yield World(engine, EngineVersions(http), crew, sessions, record)


async def test_a_group_is_eight_sessions_of_three_turns_over_the_same_digits() -> None:
    async with world() as it:
        transcripts = await it.crew.run_group(5)
    assert len({transcript.session_id for transcript in transcripts}) == 8
    assert {transcript.digits for transcript in transcripts} == {group_digits(4, 5)}
    assert it.sessions.groups == [group_id(5)] * 8
    assert sorted(it.record, key=lambda one: one.member) == transcripts
    for transcript in transcripts:
        first, second, third = tuple(transcript.digits)
        assert transcript.error is None
        assert [turn.asked for turn in transcript.turns] == [f"?{first}", f"={second}", f"={third}"]
        assert transcript.reward == pytest.approx(sum(turn.right for turn in transcript.turns) / 3)


async def test_a_session_that_fails_is_closed_with_its_error() -> None:
    async with world("http://engine/nowhere") as it:
        transcripts = await it.crew.run_group(0)
    assert all(transcript.error is not None for transcript in transcripts)
    assert {transcript.turns for transcript in transcripts} == {()}
    assert {transcript.reward for transcript in transcripts} == {0.0}
    assert len(it.sessions.closed) == 8


async def test_a_session_is_called_with_its_own_key() -> None:
    keys = list[str]()

    def refuse(request: httpx2.Request) -> httpx2.Response:
        keys.append(request.headers["authorization"])
        return httpx2.Response(503)

    sessions = DirectSessions(api_key="session-key")
    async with make_client(DefaultAsyncHttpxClient(transport=httpx2.MockTransport(refuse))) as client:
        await Crew(client, sessions, always_quick, list[Transcript]().append, group_size=2).run_group(0)
    assert keys == ["Bearer session-key"] * 2


async def test_swapped_groups_keep_their_size_but_not_their_members() -> None:
    async with world(sabotage=Sabotage.SWAP_GROUPS) as it:
        await it.crew.run_group(2)
        await it.crew.run_group(3)
    assert sorted(it.sessions.groups) == [group_id(2)] * 8 + [group_id(3)] * 8
    assert sorted(it.sessions.groups[:8]) == [group_id(2)] * 4 + [group_id(3)] * 4
    assert sorted(transcript.group for transcript in it.record) == [2] * 8 + [3] * 8


async def test_a_slow_tool_waits_until_the_first_turn_is_too_old() -> None:
    async with world() as it:
        tool = SlowTool(it.versions, 2, asyncio.Event()).for_one_session()
        await tool(0, "1")
        waiting = asyncio.ensure_future(tool(1, "2"))
        await it.publish(2)
        assert await it.versions.current() == 2
        assert not waiting.done()
        await it.publish(3)
        assert (await waiting).content == "=2"


async def test_a_stop_releases_a_slow_tool() -> None:
    stop = asyncio.Event()
    async with world() as it:
        tool = SlowTool(it.versions, 2, stop).for_one_session()
        await tool(0, "1")
        waiting = asyncio.ensure_future(tool(1, "2"))
        stop.set()
        assert (await waiting).content == "=2"


async def test_the_first_member_of_every_seventh_group_is_slow() -> None:
    async with world() as it:
        choose = tools(SlowTool(it.versions, 2, asyncio.Event()))
    assert [group for group in range(21) if is_slow(group)] == [6, 13, 20]
    slow = [(group, member) for group in range(14) for member in range(8) if choose(group, member) is not quick_tool]
    assert slow == [(6, 0), (13, 0)]


# B084: who starts groups counts neither rows nor steps
async def test_groups_start_until_the_stop_and_are_finished() -> None:
    stop = asyncio.Event()

    async def admit(group: int) -> None:
        if group == 3:
            stop.set()
            await asyncio.Event().wait()

    async with world() as it:
        assert await run_groups(it.crew, admit, stop) == 3
    assert sorted(transcript.group for transcript in it.record) == [0] * 8 + [1] * 8 + [2] * 8


async def test_unless_stopped_raises_what_the_work_raises() -> None:
    async def broken() -> None:
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        await unless_stopped(broken(), asyncio.Event())
