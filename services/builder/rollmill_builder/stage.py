"""The builder's stage: session events in, trajectories and outcomes out (rules S1, S2, E2, L3, M3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from rollmill.codec import encode
from rollmill.errors import InvalidInputError, PoisonRecordError
from rollmill.models import (
    CompletionRecord,
    Manifest,
    SessionClosed,
    SessionExpired,
    SessionOpened,
    SessionStatus,
)
from rollmill.models.sampled_tokens import captured_units
from rollmill.runtime.stream.processor import (
    InputRecord,
    OutputRecord,
    Outputs,
    Processor,
    StateUpdate,
    StateView,
    TaskContext,
)
from rollmill.runtime.stream.rerouting import rerouted
from rollmill.strategies import BaseTrajectoryBuilder, StrategyRegistry
from rollmill.topics import BUILT, COMPLETIONS, STATE_BUILDER, partition_of
from rollmill_builder.merging.closed_session import ClosedSession
from rollmill_builder.sessions import outputs
from rollmill_builder.sessions.finalize import finalize
from rollmill_builder.sessions.incremental_builder import incremental_build
from rollmill_builder.sessions.late_window import SWEEP_KEY, LateWindow, event_time, seen_until
from rollmill_builder.sessions.session_state import (
    ClosedMarker,
    MarkerSweep,
    OpenedUpdate,
    OpenSession,
    marker_key,
    read_packed,
    read_update,
    session_key,
)
from rollmill_builder.sessions.task_resources import MemoryLimits, TaskResources
from rollmill_builder.storage.call_parts import call_digest, content_digest, id_hash

__all__ = ["BuilderStage", "BuilderState"]

BuilderState = OpenSession | ClosedMarker | MarkerSweep
Event = SessionOpened | CompletionRecord | SessionClosed | SessionExpired


@dataclass(frozen=True)
class _SessionEnd:
    """How a session ends: by its agent, or by a timer."""

    at: float
    status: SessionStatus
    error: str | None = None
    output: bytes | None = None
    reward: float | None = None


class BuilderStage(Processor[BuilderState, TaskResources]):
    """``completions`` to ``built``. State: open sessions, markers of closed ones, the time of the last sweep.

    ``late_window``: seconds of event time for which a closed session is remembered. ``expiry_seconds``: how often
    open sessions are checked for expiry. ``memory``: of each task. ``largest``: most bytes of a trajectory.
    """

    name = outputs.STAGE
    inputs = (COMPLETIONS,)
    state_topic = STATE_BUILDER

    def __init__(
        self,
        *,
        registry: StrategyRegistry[BaseTrajectoryBuilder],
        partitions: int,
        late_window: float,
        expiry_seconds: float = 1.0,
        memory: MemoryLimits | None = None,
        largest: int = BUILT.max_bytes,
    ) -> None:
        self._largest = largest
        self._registry, self._partitions, self._late_window = registry, partitions, LateWindow(late_window)
        self._expiry_seconds, self._memory = expiry_seconds, memory or MemoryLimits()

    def task_local(self) -> TaskResources:
        return TaskResources(self._expiry_seconds, self._memory)

    def process(self, state: StateView[BuilderState], record: InputRecord, local: TaskResources) -> Outputs:
        event: Any = record.read()
        home = partition_of(event.session_id.encode(), self._partitions)
        if record.key != event.session_id.encode() or home != record.partition:
            return rerouted(record, event.session_id, home, count="completions_rerouted")
        key = session_key(event.session_id, event.attempt)
        marker = state.get(marker_key(key))
        if isinstance(marker, ClosedMarker):
            return _after_close(key, marker, event)
        session = state.get(key)
        is_open = isinstance(session, OpenSession)
        if not isinstance(session, OpenSession):
            self._late_window.refuse_forgotten(state, event, record.headers)
            session = OpenSession(event.session_id, event.attempt)
        if isinstance(event, SessionOpened):
            return self._open(key, session, event)
        if isinstance(event, CompletionRecord):
            return _accept(key, session, event)
        end = _end_of(event, session, is_open=is_open)
        return Outputs(counts={"expiries_ignored": 1}) if end is None else self._close(state, key, session, end, local)

    def apply(self, key: str, value: BuilderState | None, payload: bytes, local: TaskResources) -> BuilderState:
        if key == SWEEP_KEY:
            sweep: MarkerSweep = read_packed(MarkerSweep, payload)
            return sweep
        if key.endswith("/closed"):
            marker: ClosedMarker = read_packed(ClosedMarker, payload)
            local.memory.closed(key.removesuffix("/closed"))
            return marker
        session = self._updated(value if isinstance(value, OpenSession) else None, payload)
        local.memory.touch(key, session.calls.own_store())
        return session

    def _updated(self, value: OpenSession | None, payload: bytes) -> OpenSession:
        update = read_update(payload)
        session = (value or OpenSession(update.session_id, update.attempt)).updated(update)
        return self._with_incremental(session, rebuild=value is None or isinstance(update, OpenedUpdate))

    def _with_incremental(self, session: OpenSession, *, rebuild: bool) -> OpenSession:
        """The newest call goes to an incremental builder; all of them where the builder is new."""
        if not rebuild and session.incremental is None:
            return session
        build = None if rebuild else session.incremental
        if build is None:
            build = incremental_build(self._registry, session.spec, session.records())
        else:
            build = build.add(session.record(len(session.calls) - 1))
        return replace(session, incremental=build)

    def punctuate(self, state: StateView[BuilderState], context: TaskContext, local: TaskResources) -> Outputs:
        local.clock = context.now
        if not context.keeps_up:
            return Outputs()
        due = local.expired(state, context.now)
        return Outputs(
            records=tuple(OutputRecord(COMPLETIONS, item.session_id, item, partition=context.partition) for item in due)
        )

    def _open(self, key: str, session: OpenSession, event: SessionOpened) -> Outputs:
        if session.opening is not None and session.spec == event.spec:
            return Outputs(counts={"duplicates": 1})  # a caller that tries again opens at another time
        if session.opening is not None:
            raise PoisonRecordError("conflict", f"session {key} was opened already, with another content")
        try:
            self._registry.create(event.spec.builder)
        except InvalidInputError as error:
            raise PoisonRecordError("unknown_strategy", str(error)) from error
        content_digest(event)  # refuses metadata that is no JSON
        update = OpenedUpdate(session_id=event.session_id, attempt=event.attempt, event=event)
        return Outputs(updates=(StateUpdate(key, encode(update)),), counts={"sessions_opened": 1})

    def _close(
        self, state: StateView[BuilderState], key: str, session: OpenSession, end: _SessionEnd, local: TaskResources
    ) -> Outputs:
        ended = session.closed(end.at, end.status, error=end.error, output=end.output, reward=end.reward)
        closed = ClosedSession(ended, session.calls)
        trajectory = finalize(closed, self._registry, session.incremental)
        sent, value, records = outputs.closing_records(closed, trajectory, self._largest)
        marker = ClosedMarker(
            at=seen_until(state, session, ended.closed_at),
            attempt=ended.attempt,
            digest=blake2b(value, digest_size=16).digest(),
            known=b"".join(sorted(map(id_hash, closed.calls.completion_ids))),
        )
        expired, sweep = self._late_window.sweep(state, ended.closed_at, local.clock)
        return Outputs(
            records=records,
            deletes=(key, *expired),
            updates=(_marked(key, marker), *sweep),
            counts=outputs.close_counts(sent),
        )

    def gauges(self, state: StateView[BuilderState], _local: TaskResources) -> Mapping[str, float]:
        return {"sessions_open": sum(isinstance(value, OpenSession) for _, value in state.items())}


def _end_of(event: SessionClosed | SessionExpired, session: OpenSession, *, is_open: bool) -> _SessionEnd | None:
    """How the session ends by this event; None: it does not."""
    if isinstance(event, SessionClosed):
        content_digest(event)  # refuses output that is no JSON
        return _SessionEnd(event.at, event.status, event.error, event.output, event.reward)
    if not is_open or (event.reason == "idle" and len(session.calls) > event.seen):
        return None
    return _SessionEnd(event.at, SessionStatus.TIMEOUT, f"session expired: {event.reason}")


def _accept(key: str, session: OpenSession, record: CompletionRecord) -> Outputs:
    digest, parts = call_digest(record)
    known = session.calls.digest_of(record.completion_id)
    if known is not None and known != digest:
        raise PoisonRecordError(
            "conflict", f"completion {record.completion_id} was received before, with another content"
        )
    if known is not None:
        return Outputs(counts={"duplicates": 1})
    units = captured_units(record)
    manifest = Manifest(session_id=record.session_id, attempt=record.attempt, units=units)
    update = encode(session.call_update(record, parts, digest))
    counts = {"completions": 1, "tokens_captured": manifest.tokens}
    return Outputs(
        outputs.captured_outcomes(record, units), (StateUpdate(key, update, manifest=manifest),), counts=counts
    )


def _after_close(key: str, marker: ClosedMarker, event: Event) -> Outputs:
    """Within the late window a known call is a duplicate, a new one is captured and excluded, once (rule S2)."""
    if not isinstance(event, CompletionRecord):
        later = () if event_time(event) <= marker.at else (_marked(key, marker.replace(at=event_time(event))),)
        return Outputs(updates=later, counts={"after_close": 1})
    if marker.knows(event.completion_id):
        return Outputs(counts={"duplicates": 1})
    units = captured_units(event)
    tokens = sum(unit.tokens for unit in units)
    counts = {"late": 1, "tokens_captured": tokens, "excluded_late": tokens}
    update = _marked(key, marker.with_late(event.completion_id, event_time(event)))
    return Outputs(outputs.late_outcomes(event, units), (update,), counts=counts)


def _marked(key: str, marker: ClosedMarker) -> StateUpdate:
    return StateUpdate(marker_key(key), encode(marker), replaces=True)
