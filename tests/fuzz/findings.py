"""Findings of the fuzz tests that are known and not mended yet.

The fuzz tests pass over what such a finding covers, and a test for each demands that it still occurs: whoever mends one
removes it here in the same commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollmill.codec import JSON, decode, encode
from rollmill.testing.samples.trajectories import sample_trajectory
from rollmill.topics import TRAJECTORIES, Topic
from tests.fuzz.capture_rig import FuzzRequest
from tests.fuzz.records import fault_of


@dataclass(frozen=True)
class KnownHttpFinding:
    name: str
    example: FuzzRequest
    """A request that shows it."""
    covers: Callable[[FuzzRequest, str], bool]
    """Whether a request and its fault are this finding."""


@dataclass(frozen=True)
class KnownRecordFinding:
    name: str
    example: Callable[[], str | None]
    """The fault that its example shows; None: it shows none any more."""
    covers: Callable[[str], bool]
    """Whether a fault is this finding."""


HTTP: tuple[KnownHttpFinding, ...] = ()


def _read(topic: Topic, value: bytes) -> str | None:
    return fault_of(lambda: decode(topic.model, value))


def _reward_of_another_type() -> str | None:
    value = encode(sample_trajectory("s1", 1.0), JSON).replace(b'"outcome_reward":1.0', b'"outcome_reward":{}')
    return _read(TRAJECTORIES, value) or fault_of(lambda: decode(TRAJECTORIES.model, value).outcome_reward)


RECORDS: tuple[KnownRecordFinding, ...] = (
    KnownRecordFinding(
        "a reward that is no number",
        _reward_of_another_type,
        lambda fault: "Error in trajectory.py:outcome_reward: " in fault,
    ),
)
