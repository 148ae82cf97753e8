"""What the merger keeps of a session: values, their state keys and their bytes.

``<session>:<attempt>`` the built trajectory, ``…/evaluations`` its evaluations, ``…/closed`` the marker that remains
when it takes no more revisions.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from rollmill.codec import MSGPACK, decode, encode
from rollmill.models import Evaluation, Trajectory, dump_json
from rollmill.runtime.stream import StateView

EVALUATIONS_SUFFIX = "/evaluations"
CLOSED_SUFFIX = "/closed"

HASH = 8
"""Bytes of a hash in a marker."""
AT = struct.Struct("<d")

IDENTITY = (  # the fields that two evaluations of one id have to agree in
    "evaluator",
    "supersedes",
    "final",
    "outcome_reward",
    "trace_rewards",
    "turn_rewards",
    "token_rewards",
    "not_graded",
    "components",
)


@dataclass(frozen=True)
class Built:
    trajectory: Trajectory
    digest: bytes


@dataclass(frozen=True)
class PendingEvaluations:
    """The evaluations of a session so far, in the order of their partition, each id once."""

    evaluations: tuple[Evaluation, ...]


@dataclass(frozen=True)
class ClosedMarker:
    """A session that takes no more revisions."""

    at: float
    """Event time of the closing, in seconds."""
    digest: bytes
    """Of the built trajectory."""
    known: tuple[bytes, ...]
    """Of each evaluation that came in time: hash of its id, then hash of its content."""

    def matches(self, evaluation: Evaluation) -> bool | None:
        """True: it came before. False: its id came before with other content. None: its id is new."""
        name = short_hash(evaluation.evaluation_id.encode())
        known = next((each for each in self.known if each.startswith(name)), None)
        return None if known is None else known == fingerprint(evaluation)


StateValue = Built | PendingEvaluations | ClosedMarker


def key_of(record: Trajectory | Evaluation) -> str:
    return f"{record.session_id}:{record.attempt}"


def short_hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH).digest()


def fingerprint(evaluation: Evaluation) -> bytes:
    """Hash of the id, then hash of the content. When it was made, and how fast, is not part of its identity."""
    content = [getattr(evaluation, name) for name in IDENTITY]
    return short_hash(evaluation.evaluation_id.encode()) + short_hash(dump_json(content))


def apply_update(key: str, value: StateValue | None, payload: bytes) -> StateValue:
    """``value`` after one update."""
    if key.endswith(CLOSED_SUFFIX):
        return unpack_closed(payload)
    if not key.endswith(EVALUATIONS_SUFFIX):
        return Built(decode(Trajectory, payload), short_hash(payload))
    return PendingEvaluations((*pending_evaluations(value), decode(Evaluation, payload)))


def pending_evaluations(value: StateValue | None) -> tuple[Evaluation, ...]:
    """Those that ``value`` holds: none, unless it is the value of a session's evaluations."""
    return value.evaluations if isinstance(value, PendingEvaluations) else ()


def evaluations_of(state: StateView[StateValue], key: str) -> tuple[Evaluation, ...]:
    """All evaluations so far of the session with this key."""
    return pending_evaluations(state.get(key + EVALUATIONS_SUFFIX))


def pack_trajectory(trajectory: Trajectory) -> bytes:
    return encode(trajectory, MSGPACK)


def pack_evaluation(evaluation: Evaluation) -> bytes:
    return encode(evaluation, MSGPACK)


def pack_closed(closed: ClosedMarker) -> bytes:
    return AT.pack(closed.at) + closed.digest + b"".join(closed.known)


def unpack_closed(payload: bytes) -> ClosedMarker:
    digest, known = payload[AT.size : AT.size + HASH], payload[AT.size + HASH :]
    parts = tuple(known[start : start + 2 * HASH] for start in range(0, len(known), 2 * HASH))
    return ClosedMarker(AT.unpack_from(payload)[0], digest, parts)
