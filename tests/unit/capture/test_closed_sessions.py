"""What capture keeps of sessions that are closed: every replica holds all of a day's (rule S3)."""

import tracemalloc

import pytest

from rollmill.codec import JSON, decode, encode
from rollmill.models import EvaluatorSpec, SessionEntry, SessionSpec, SessionState
from rollmill_capture.coordination.closed_session import ClosedSession, spec_of_closed
from rollmill_capture.coordination.session_table import SessionTable

SESSIONS = 2000
FULL = SessionSpec(
    task_id="t",
    group_id="g",
    group_size=8,
    evaluators=(EvaluatorSpec(strategy="reported"),),
    metadata={"tenant": "alice", "expected_answer": "42", "x": "y" * 5000},
)


def opened(session_id: str, spec: SessionSpec = FULL) -> SessionEntry:
    return SessionEntry(session_id=session_id, state=SessionState.OPEN, spec=spec, opened_at=1.0, token="ab" * 32)


def closed(session_id: str, spec: SessionSpec = FULL) -> SessionEntry:
    return opened(session_id, spec).replace(state=SessionState.CLOSED, closing="cd" * 32, closed_at=5.0)


def test_f6_of_a_closed_session_some_hundred_bytes_are_kept_whatever_its_spec_was() -> None:
    table, entries = SessionTable(), [encode(closed(f"session-{number:08}"), JSON) for number in range(SESSIONS)]
    tracemalloc.start()
    try:
        for value in entries:
            table.apply(decode(SessionEntry, value))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == SESSIONS
    assert size / SESSIONS < 1000


@pytest.mark.parametrize(
    "spec",
    [FULL, SessionSpec(), SessionSpec(metadata={"tenant": 7}), SessionSpec(policy="other", deadline_seconds=9.0)],
)
def test_what_later_requests_need_is_the_same_before_and_after(spec: SessionSpec) -> None:
    table, entry = SessionTable(), closed("s", spec)
    table.apply(entry)
    found = table.get("s")
    assert found == entry.replace(spec=spec_of_closed(spec))
    assert found.tenant == entry.tenant
    assert (found.spec.group_id, found.spec.policy, found.spec.deadline_seconds) == (
        spec.group_id,
        spec.policy,
        spec.deadline_seconds,
    )
    assert decode(SessionEntry, encode(found, JSON)) == found
    assert ClosedSession.of(found) == ClosedSession.of(entry)
    assert table.of_token("ab" * 32) == found
    table.apply(opened("s").replace(attempt=2))
    assert table.of_token("ab" * 32) == opened("s").replace(attempt=2)
    table.forget("s", None)
    assert table.of_token("ab" * 32) is None
