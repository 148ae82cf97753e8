"""Findings of the fuzz tests that are known and not mended yet.

The fuzz tests pass over what such a finding covers, and a test for each demands that it still occurs: whoever mends one
removes it here in the same commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from rollmill.codec import JSON, decode, encode
from rollmill.models import CompletionRecord, PolicyAnnouncement, PolicyVersion, SessionClosed
from rollmill.runtime.stream import Processor
from rollmill.strategies import builder_registry
from rollmill.testing.samples.trajectories import sample_trajectory
from rollmill.topics import BUILT, COMPLETIONS, POLICIES, TRAJECTORIES, Topic
from rollmill_batcher.groups.config import BatcherConfig, Learning
from rollmill_batcher.stage import BatcherStage
from rollmill_batcher.steps.advantages import Grpo
from rollmill_builder.stage import BuilderStage
from tests.fuzz.capture_rig import ADMIN, TENANTS, FuzzRequest, bearer
from tests.fuzz.records import content_type, fault_of
from tests.fuzz.stages import StageRun, Stream

COUNTED = b'{"model": [], "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}'
NESTED = b'{"messages": [{"role": "user", "content": ' + b"[" * 300 + b"]" * 300 + b"}]}"


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


HTTP: tuple[KnownHttpFinding, ...] = (
    KnownHttpFinding(
        "count_tokens: a model that is no string",
        FuzzRequest("POST", "/sessions/s1/v1/messages/count_tokens", b"", bearer(TENANTS["a"]), COUNTED),
        lambda request, fault: "unhashable type" in fault and "count_tokens" in request.path,
    ),
    KnownHttpFinding(
        "JSON that is nested deeper than it can be written again",
        FuzzRequest("POST", "/sessions/s1/v1/chat/completions", b"", bearer(TENANTS["a"]), NESTED),
        lambda _, fault: fault == "TypeError: Recursion limit reached",
    ),
    KnownHttpFinding(
        "a policy's name that ends with a newline",
        FuzzRequest("POST", "/admin/policies/policy\n/resume", b"", bearer(ADMIN), b"{}"),
        lambda request, fault: fault.startswith("ValidationError") and "\n" in request.path,
    ),
)


def _read(topic: Topic, value: bytes) -> str | None:
    return fault_of(lambda: decode(topic.model, value))


def _run(stage: Processor[Any, Any], stream: Stream) -> str | None:
    run = StageRun(stage)
    for topic, record in stream:
        run.feed(topic, record)
    list(run.pass_time())
    return run.faults[0] if run.faults else None


def _empty_choice() -> str | None:
    call = decode(CompletionRecord, b'{"session_id": "s", "completion_id": "c", "choices": [{}]}', content_type(JSON))
    stage = BuilderStage(registry=builder_registry(), partitions=1, late_window=100.0)
    return _run(stage, [(COMPLETIONS, call), (COMPLETIONS, SessionClosed(session_id="s"))])


def _huge_epoch() -> str | None:
    config = BatcherConfig("run", "policy", Learning("grpo", Grpo()), groups_per_step=1)
    announced = PolicyAnnouncement(version=PolicyVersion(10**9, 1), at=1.0)
    members = [sample_trajectory(f"s{number}", number * 1.0) for number in range(2)]
    return _run(BatcherStage(config), [(POLICIES, announced), *((TRAJECTORIES, member) for member in members)])


def _reward_of_another_type() -> str | None:
    value = encode(sample_trajectory("s1", 1.0), JSON).replace(b'"outcome_reward":1.0', b'"outcome_reward":{}')
    return _read(TRAJECTORIES, value) or fault_of(lambda: decode(TRAJECTORIES.model, value).outcome_reward)


RECORDS: tuple[KnownRecordFinding, ...] = (
    KnownRecordFinding(
        "MessagePack: a key that cannot be hashed",
        lambda: _read(BUILT, b"\x81\x90\x01"),
        lambda fault: fault.startswith("TypeError in codec.py:_parse: unhashable type"),
    ),
    KnownRecordFinding(
        "MessagePack: bytes inside a field of JSON",
        lambda: _read(COMPLETIONS, msgpack.packb({"type": "session_closed", "session_id": "s", "output": {"a": b"x"}})),
        lambda fault: fault.startswith("TypeError in base.py:validate: "),
    ),
    KnownRecordFinding("an empty choice", _empty_choice, lambda fault: "zip() argument" in fault),
    KnownRecordFinding(
        "an epoch of a billion", _huge_epoch, lambda fault: fault.startswith("SlowError in versions.py")
    ),
    KnownRecordFinding(
        "a reward that is no number",
        _reward_of_another_type,
        lambda fault: "Error in trajectory.py:outcome_reward: " in fault,
    ),
)
