"""When a group may start: so that the agents are one step ahead of the trainer and no further."""

import asyncio
from dataclasses import dataclass, field

from relay.agents import Transcript
from relay.pacing import is_slow


@dataclass
class Admission:
    """At most ``limit`` groups whose tokens have not all found an end, trained or not.

    A group that is dropped makes room for another as one that is trained does, so nothing waits for ever. Slow groups
    come on top: they are there to be excluded, and a step that counted on them would starve.
    """

    limit: int
    group_size: int
    _unsettled: dict[int, set[str]] = field(default_factory=dict)
    """Sessions that have found their end, of each group that has not."""
    _groups: dict[str, int] = field(default_factory=dict)
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    async def admit(self, group: int) -> None:
        """Returns when the group may start. For one caller at a time."""
        while not is_slow(group) and self.in_flight >= self.limit:
            self._room.clear()
            await self._room.wait()
        self._unsettled[group] = set()

    @property
    def in_flight(self) -> int:
        """Groups that count, started and not settled."""
        return sum(not is_slow(group) for group in self._unsettled)

    def ended(self, transcript: Transcript) -> None:
        """An agent is done. One that read nothing has no tokens that could find an end."""
        self._groups[transcript.session_id] = transcript.group
        if not transcript.turns:
            self.settled(transcript.session_id)

    def settled(self, session_id: str) -> None:
        """Tokens of a session have found their end."""
        group = self._groups.get(session_id)
        if group is None or group not in self._unsettled:
            return
        self._unsettled[group].add(session_id)
        if len(self._unsettled[group]) == self.group_size:
            del self._unsettled[group]
            self._room.set()
