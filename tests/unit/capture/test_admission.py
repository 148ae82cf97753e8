"""Which groups may start: capacity by staleness, whole groups, and what makes room again."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from rollmill.models import (
    Disposition,
    PolicyVersion,
    Purpose,
    SessionEntry,
    SessionSpec,
    SessionState,
    TokenRange,
    outcome,
)
from rollmill_capture.admission import Admission, AdmissionLimits, NoCapacityError, capacity

LIMITS = AdmissionLimits(max_staleness=2, per_version=8)


@dataclass
class Gate:
    """Admission with a clock and a version that a test sets."""

    limits: AdmissionLimits = LIMITS
    version: int = 0
    now: float = 1000.0
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        self.admission = Admission({"policy": self.limits}, lambda _: PolicyVersion(0, self.version))

    @property
    def room(self) -> int:
        return self.admission.capacity("policy", self.now)

    def open(self, session: str, **spec: Any) -> None:
        made = SessionSpec(**{"group_id": "g", "group_size": 4, **spec})
        self.admission.admit(session, made, self.now)
        self.see(session, SessionState.OPEN, made)

    def close(self, session: str, tokens: int = 10, **spec: Any) -> None:
        if tokens:
            self.hear(session, Disposition.CAPTURED, tokens)
        self.see(session, SessionState.CLOSED, SessionSpec(**{"group_id": "g", "group_size": 4, **spec}))

    def see(self, session: str, state: SessionState, spec: SessionSpec) -> None:
        entry = SessionEntry(session_id=session, state=state, spec=spec, opened_at=self.now)
        self.admission.observe(entry, self.now)

    def hear(self, session: str, disposition: Disposition, tokens: int = 10) -> None:
        units = (TokenRange(completion_id="c", choice=0, start=0, stop=tokens, version=PolicyVersion()),)
        self.admission.count_tokens(outcome(disposition, stage="x", session_id=session, attempt=1, units=units))


@pytest.mark.parametrize(
    ("version", "accepted", "running", "expected"),
    [(0, 0, 0, 24), (100, 800, 0, 24), (100, 0, 0, 824), (100, 816, 6, 2), (3, 40, 10, -2)],
)
def test_the_formula(version: int, accepted: int, running: int, expected: int) -> None:
    assert capacity(LIMITS, version=version, accepted=accepted, running=running) == expected


def test_most_at_once_bounds_it_too() -> None:
    limits = AdmissionLimits(max_staleness=2, per_version=8, max_concurrent=10)
    assert capacity(limits, version=0, accepted=0, running=4) == 6


def test_after_a_restart_at_version_100_with_nothing_running_there_is_room_for_24_and_not_824() -> None:
    assert Gate(version=100).room == 24


def test_a_group_keeps_all_its_slots_from_its_first_session_on() -> None:
    gate = Gate()
    gate.open("s1")
    assert gate.room == 20
    for number in (2, 3, 4):
        gate.open(f"s{number}")
    assert gate.room == 20


def test_a_group_that_does_not_fit_whole_may_not_start_and_a_group_that_has_started_may_go_on() -> None:
    gate = Gate(AdmissionLimits(max_staleness=0, per_version=6))
    gate.open("s1")
    with pytest.raises(NoCapacityError, match="room for 2 more trajectories and the group needs 4") as refused:
        gate.open("t1", group_id="h")
    assert refused.value.retry_after > 0
    gate.open("s2")
    gate.open("alone", group_id=None, group_size=1)
    assert gate.room == 1


def test_a_closed_session_waits_until_its_tokens_have_an_end() -> None:
    gate = Gate(AdmissionLimits(max_staleness=0, per_version=4))
    for number in range(4):
        gate.open(f"s{number}")
    for number in range(4):
        gate.close(f"s{number}")
    assert gate.room == 0
    for number in range(3):
        gate.hear(f"s{number}", Disposition.TRAINED)
    assert gate.room == 3
    gate.hear("s3", Disposition.EXCLUDED)
    assert gate.room == 4
    gate.open("t0", group_id="h")


def test_a_higher_version_alone_makes_no_room_for_what_still_waits() -> None:
    gate = Gate(AdmissionLimits(max_staleness=0, per_version=4))
    for number in range(4):
        gate.open(f"s{number}")
        gate.close(f"s{number}")
    gate.version = 1
    with pytest.raises(NoCapacityError):
        gate.open("t0", group_id="h")


def test_some_tokens_with_an_end_are_not_all() -> None:
    gate = Gate(AdmissionLimits(max_staleness=0, per_version=1))
    gate.open("s1", group_id=None, group_size=1)
    gate.close("s1", group_id=None, group_size=1)
    gate.hear("s1", Disposition.EXCLUDED, 4)
    assert gate.room == 0
    gate.hear("s1", Disposition.TRAINED, 6)
    assert gate.room == 1


def test_a_session_without_tokens_makes_room_by_itself_after_a_while() -> None:
    gate = Gate(AdmissionLimits(max_staleness=0, per_version=1))
    gate.open("s1", group_id=None, group_size=1)
    gate.close("s1", tokens=0, group_id=None, group_size=1)
    assert gate.room == 0
    gate.now += 61
    assert gate.room == 1


def test_slots_of_members_that_never_come_or_never_close_are_free_after_the_deadline() -> None:
    gate = Gate(AdmissionLimits(max_staleness=0, per_version=4))
    gate.open("s1", deadline_seconds=100.0)
    assert gate.room == 0
    gate.now += 101
    assert gate.room == 4


def test_eval_is_neither_counted_nor_refused_and_a_policy_without_limits_is_free() -> None:
    gate = Gate(AdmissionLimits(max_staleness=0, per_version=4))
    gate.open("s1")
    gate.open("e1", group_id="e", purpose=Purpose.EVAL)
    gate.open("o1", group_id="o", policy="other")
    assert gate.room == 0


def test_a_group_larger_than_all_the_room_there_is_starts_alone() -> None:
    gate = Gate(AdmissionLimits(max_staleness=0, per_version=2))
    gate.open("s1", group_size=8)
    with pytest.raises(NoCapacityError):
        gate.open("t1", group_id="h", group_size=1)


def test_a_member_too_many_needs_room_of_its_own_and_a_second_attempt_does_not() -> None:
    gate = Gate(AdmissionLimits(max_staleness=0, per_version=2))
    gate.open("s1", group_size=2)
    gate.open("s2", group_size=2)
    gate.open("s1", group_size=2)
    with pytest.raises(NoCapacityError):
        gate.open("s3", group_size=2)


def test_a_session_that_was_admitted_and_did_not_open_gives_its_slots_back() -> None:
    gate = Gate()
    spec = SessionSpec(group_id="g", group_size=4)
    gate.admission.admit("s1", spec, gate.now)
    assert gate.room == 20
    gate.admission.withdraw("s1", spec)
    assert gate.room == 24


def test_at_a_restart_open_sessions_count_and_closed_ones_do_not() -> None:
    gate = Gate()
    for number in range(4):
        gate.open(f"s{number}")
    for number in range(2):
        gate.close(f"s{number}", tokens=0)
    gate.admission.mark_caught_up()
    assert gate.room == 22


def test_the_loop_does_not_run_dry() -> None:
    """Groups of 2, two per version, lag 0: what is trained makes room for as much again, for ever."""
    gate = Gate(AdmissionLimits(max_staleness=0, per_version=4))
    for step in range(50):
        for group in range(2):
            for member in range(2):
                gate.open(f"s{step}-{group}-{member}", group_id=f"g{step}-{group}", group_size=2)
        with pytest.raises(NoCapacityError):
            gate.open(f"x{step}", group_id="x", group_size=2)
        for group in range(2):
            for member in range(2):
                session = f"s{step}-{group}-{member}"
                gate.close(session, group_id=f"g{step}-{group}", group_size=2)
                gate.hear(session, Disposition.TRAINED if group else Disposition.DEAD_LETTERED)
        gate.version += 1
    assert not gate.admission._tokens or gate.room == 4


def test_tokens_of_sessions_outside_of_groups_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill_capture.admission.MOST_UNASSIGNED", 10)
    gate = Gate()
    gate.open("s1")
    for number in range(100):
        gate.hear(f"eval-{number}", Disposition.CAPTURED)
    assert len(gate.admission._unassigned) == 10
    assert list(gate.admission._tokens) == ["s1"]


def test_an_outcome_that_is_read_before_its_session_counts_all_the_same() -> None:
    gate = Gate(AdmissionLimits(max_staleness=0, per_version=2))
    gate.open("s0", group_id="first", group_size=1)
    gate.hear("s1", Disposition.CAPTURED)
    gate.open("s1", group_id="second", group_size=1)
    gate.close("s1", tokens=0, group_id="second", group_size=1)
    gate.now += 100
    assert gate.room == 0
