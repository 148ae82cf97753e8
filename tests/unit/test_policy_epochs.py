"""Epochs come one after the other, and nothing takes longer where one is large (rules A4, R1)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.codec import decode
from rollmill.errors import PoisonRecordError
from rollmill.models import CompletionEvent, PolicyAnnouncement, PolicyVersion, dump_json, staleness
from rollmill.models.versions import skips_epochs
from rollmill.trainer.policy.history import history_of
from rollmill_capture.coordination.policies import AnnouncedVersions

HUGE = 1_700_000_000
epochs, versions = st.integers(0, 6), st.integers(0, 9)


def by_each_epoch(sampled: PolicyVersion, current: PolicyVersion, forks: dict[int, int]) -> int:
    """The definition of rule A4, epoch by epoch."""
    fork = min((forks.get(epoch, 0) for epoch in range(sampled.epoch + 1, current.epoch + 1)), default=sampled.version)
    if sampled.version <= fork:
        return current.version - sampled.version
    return (current.version - fork) + (sampled.version - fork)


@settings(deadline=None)
@given(epochs, versions, epochs, versions, st.dictionaries(epochs, versions))
def test_f11_staleness_is_that_of_the_definition(e: int, r: int, c: int, v: int, forks: dict[int, int]) -> None:
    sampled, current = PolicyVersion(min(e, c), r), PolicyVersion(c, v)
    assert staleness(sampled, current, forks) == by_each_epoch(sampled, current, forks)


def test_f11_large_epochs_cost_nothing() -> None:
    assert staleness(PolicyVersion(0, 5), PolicyVersion(HUGE, 7), {3: 2}) == 7 + 5


@pytest.mark.parametrize(
    ("version", "newest", "skips"),
    [
        (PolicyVersion(HUGE, 0), None, False),
        (PolicyVersion(0, 9), PolicyVersion(0, 1), False),
        (PolicyVersion(2, 0), PolicyVersion(1, 1), False),
        (PolicyVersion(0, 0), PolicyVersion(5, 1), False),
        (PolicyVersion(3, 0), PolicyVersion(1, 1), True),
    ],
)
def test_f11_an_epoch_is_at_most_the_next(version: PolicyVersion, newest: PolicyVersion | None, *, skips: bool) -> None:
    assert skips_epochs(version, newest) is skips


def test_f11_every_reader_ignores_an_announcement_that_skips_epochs() -> None:
    made = [PolicyVersion(0, 1), PolicyVersion(HUGE, 2), PolicyVersion(1, 2)]
    history = history_of("policy", [PolicyAnnouncement(version=version, at=1.0) for version in made])
    assert [item.version for item in history.announcements] == [made[0], made[2]]
    announced = AnnouncedVersions()
    for version in made:
        announced.learn("policy", version)
    assert announced.newest("policy") == made[2]


@pytest.mark.parametrize("version", [[2**31, 0], [0, 2**31], [0, 1_700_000_000_000]])
def test_a_version_that_no_batch_can_hold_is_refused_where_it_is_read(version: list[int]) -> None:
    event = {"session_id": "s", "type": "completion", "completion_id": "c", "policy": {"before": version}}
    for model, value in ((CompletionEvent, event), (PolicyAnnouncement, {"version": version, "at": 1.0})):
        with pytest.raises(PoisonRecordError):
            decode(model, dump_json(value))
    largest = {**event, "policy": {"before": [2**31 - 1, 2**31 - 1]}}
    assert decode(CompletionEvent, dump_json(largest)) is not None
