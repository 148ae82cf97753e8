"""When a group may start: so that the agents are one step ahead of the trainer and no further."""

import asyncio
from dataclasses import dataclass, field

from relay.agents import Transcript
from relay.pacing import is_slow


@dataclass
class _Progress:
    """A group that is under way, by its sessions."""

    ended: set[str] = field(default_factory=set)
    settled: set[str] = field(default_factory=set)


@dataclass
class Admission:
    """At most ``limit`` groups whose tokens have not all found an end, trained or not; ``at_once`` with agents at work.

    A group that is dropped makes room for another as one that is trained does, so nothing waits for ever. More agents
    at once make no more calls per second, only older tokens and longer lists of connections. Slow groups come on top:
    they are there to be excluded, and a step that counted on them would starve.
    """

    limit: int
    at_once: int
    group_size: int
    _under_way: dict[int, _Progress] = field(default_factory=dict)
    _groups: dict[str, int] = field(default_factory=dict)
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    async def admit(self, group: int) -> None:
        """Returns when the group may start. For one caller at a time."""
        while not (is_slow(group) or self._has_room):
            self._room.clear()
            await self._room.wait()
        self._under_way[group] = _Progress()

    @property
    def _has_room(self) -> bool:
        counted = [progress for group, progress in self._under_way.items() if not is_slow(group)]
        at_work = sum(len(progress.ended) < self.group_size for progress in counted)
        return len(counted) < self.limit and at_work < self.at_once

    def ended(self, transcript: Transcript) -> None:
        """An agent is done. One that read nothing has no tokens that could find an end."""
        self._groups[transcript.session_id] = transcript.group
        self._under_way[transcript.group].ended.add(transcript.session_id)
        self._room.set()
        if not transcript.turns:
            self.settled(transcript.session_id)

    def settled(self, session_id: str) -> None:
        """Tokens of a session have found their end."""
        group = self._groups.get(session_id)
        if group is None or group not in self._under_way:
            return
        self._under_way[group].settled.add(session_id)
        if len(self._under_way[group].settled) == self.group_size:
            del self._under_way[group]
            self._room.set()
