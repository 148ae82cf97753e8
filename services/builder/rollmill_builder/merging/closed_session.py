"""A closed session, as the builders of this package read it: its calls are stored in one trie."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rollmill.models import CompletionRecord, CompletionSession, Trajectory, TrajectoryStatus
from rollmill.strategies import BaseTrajectoryBuilder, trajectory_of
from rollmill_builder.storage.call_store import CallContent, CallLog
from rollmill_builder.storage.trie import TriePosition


class RecordedCall(NamedTuple):
    """One call of a session."""

    record: CompletionRecord
    """Prompt and request may be left out."""
    number: int
    """In ``ClosedSession.content``."""
    prompt: TriePosition | None
    """Of the prompt's token ids; None where they are unknown."""

    @property
    def has_prompt_ids(self) -> bool:
        """Whether the ids of its prompt are known, and are any."""
        return self.prompt is not None and self.prompt.end > 0


@dataclass(frozen=True)
class ClosedSession:
    session: CompletionSession
    """Identity, times and end; its calls may be left out."""
    calls: CallLog
    """In order of acceptance."""

    @classmethod
    def of(cls, session: CompletionSession) -> ClosedSession:
        return cls(session, CallLog.of(session.completions))

    @property
    def content(self) -> CallContent:
        return self.calls.content

    @cached_property
    def sorted_calls(self) -> tuple[RecordedCall, ...]:
        """By (start, completion id), whatever the order of acceptance."""
        found = [self._recorded(number) for number in range(len(self.calls))]
        return tuple(sorted(found, key=lambda call: (call.record.started_at, call.record.completion_id)))

    @cached_property
    def full_session(self) -> CompletionSession:
        """With all calls, prompts in full."""
        if len(self.session.completions) == len(self.calls):
            return self.session
        identity = self.session.session_id, self.session.attempt
        records = tuple(self.calls.full_record(number, *identity) for number in range(len(self.calls)))
        return CompletionSession.model_validate({**dict(self.session), "completions": records})

    def _recorded(self, number: int) -> RecordedCall:
        record = self.calls.record(number, self.session.session_id, self.session.attempt)
        return RecordedCall(record, number, self.content.ids.head(number))


class ClosedSessionBuilder(BaseTrajectoryBuilder):
    """Base of the builders that read calls in the trie, and put no prompt together that no trace shows."""

    @abstractmethod
    def build_closed(self, closed: ClosedSession) -> Trajectory:
        """The trajectory of a session."""

    def build(self, session: CompletionSession) -> Trajectory:
        return self.build_closed(ClosedSession.of(session))


def no_completions(session: CompletionSession, builder: str) -> Trajectory:
    """The trajectory of a session without a single call."""
    metadata = {"builder": builder, "records": 0, "session_status": session.status.value}
    return trajectory_of(session, status=TrajectoryStatus.ERROR, error="no completions", metadata=metadata)
