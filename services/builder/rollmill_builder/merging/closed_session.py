"""A session that ended, as the strategies of this package read it: its calls lie in one trie."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rollmill.models import CompletionRecord, CompletionSession, Trajectory
from rollmill.strategies import BaseTrajectoryBuilder
from rollmill_builder.storage.call_store import CallLog, Content
from rollmill_builder.storage.trie import TriePosition


class Recorded(NamedTuple):
    """One call of a session."""

    record: CompletionRecord
    """Prompt and request may be left out."""
    number: int
    """In ``ClosedSession.content``."""
    prompt: TriePosition | None
    """Of the prompt's token ids; None where they are unknown."""

    @property
    def prompted(self) -> bool:
        """Whether the ids of its prompt are known, and are any."""
        return self.prompt is not None and self.prompt.end > 0


@dataclass(frozen=True)
class ClosedSession:
    session: CompletionSession
    """Identity, times and end; its calls may be left out."""
    log: CallLog

    @classmethod
    def of(cls, session: CompletionSession) -> ClosedSession:
        return cls(session, CallLog.of(session.completions))

    @property
    def content(self) -> Content:
        return self.log.content

    @cached_property
    def calls(self) -> tuple[Recorded, ...]:
        """Sorted by (start, id), whatever the order of acceptance."""
        found = [self._recorded(number) for number in range(len(self.log))]
        return tuple(sorted(found, key=lambda item: (item.record.started_at, item.record.completion_id)))

    @cached_property
    def whole(self) -> CompletionSession:
        """With all calls, prompts in full."""
        if len(self.session.completions) == len(self.log):
            return self.session
        name = self.session.session_id, self.session.attempt
        records = tuple(self.log.whole(number, *name) for number in range(len(self.log)))
        return CompletionSession.model_validate({**dict(self.session), "completions": records})

    def _recorded(self, number: int) -> Recorded:
        record = self.log.record(number, self.session.session_id, self.session.attempt)
        return Recorded(record, number, self.content.ids.head(number))


class CallBuilder(BaseTrajectoryBuilder):
    """Base of the strategies that read calls where they lie, and never put a prompt together that no trace shows."""

    @abstractmethod
    def build_calls(self, ended: ClosedSession) -> Trajectory:
        """The trajectory of a session."""

    def build(self, session: CompletionSession) -> Trajectory:
        return self.build_calls(ClosedSession.of(session))
