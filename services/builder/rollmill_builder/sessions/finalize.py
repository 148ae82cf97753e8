"""The trajectory of a closed session: build, check, fit into a record.

Whatever a builder does, a trajectory comes out, and every captured token is accounted for.
"""

from __future__ import annotations

import asyncio

from rollmill.codec import MSGPACK, encode
from rollmill.errors import FatalError
from rollmill.models import CompletionSession, PolicyVersion, TokenRange, Trajectory, TrajectoryStatus
from rollmill.models.sampled_tokens import captured_units
from rollmill.strategies import BaseTrajectoryBuilder, StrategyRegistry, trajectory_of
from rollmill.strategies.foreign_code import contained
from rollmill_builder.merging.closed_session import ClosedSession, ClosedSessionBuilder, no_completions
from rollmill_builder.merging.sampled_calls import by_reason
from rollmill_builder.sessions.incremental_builder import IncrementalBuild, error_text
from rollmill_builder.sessions.token_accounting import account_tokens
from rollmill_builder.storage.trie import TOKEN_BYTES

PASSED_ON = (FatalError, KeyboardInterrupt, asyncio.CancelledError)
"""Never an error of a session."""


def finalize(
    closed: ClosedSession,
    registry: StrategyRegistry[BaseTrajectoryBuilder],
    incremental: IncrementalBuild | None = None,
) -> Trajectory:
    """The checked trajectory of a session; a failing builder gives status ERROR and excludes all its units.

    ``incremental``: what an incremental builder has made of the calls so far.
    """
    name = closed.session.spec.builder.strategy
    if not len(closed.calls):
        return no_completions(closed.session, name)
    try:
        with contained():
            built = _with_identity(closed.session, _build(closed, registry, incremental))
            accounted = account_tokens(closed, built)
            encode(accounted)
    except PASSED_ON:
        raise
    except Exception as error:  # noqa: BLE001  # foreign code may raise anything, and no session may be lost by it
        return _after_failure(closed, f"builder {name} failed: {error_text(error)}")
    return accounted


def _after_failure(closed: ClosedSession, error: str) -> Trajectory:
    """Where not even the calls can be read, the session ends all the same: its timers would fire for ever."""
    try:
        return without_traces(closed, "builder_error", error)
    except PASSED_ON:
        raise
    except Exception as second:  # noqa: BLE001  # whatever it is, the session has to end
        text = f"{error}; its calls cannot be read: {error_text(second)}"
        units = [("unreadable", _stored_units(closed, number)) for number in range(len(closed.calls))]
        return trajectory_of(closed.session, excluded=by_reason(units), status=TrajectoryStatus.ERROR, error=text)


def _stored_units(closed: ClosedSession, number: int) -> tuple[TokenRange, ...]:
    """Of a call, by the number of its stored token ids where the rest of it cannot be read."""
    try:
        return captured_units(closed.calls.record(number, closed.session.session_id, closed.session.attempt))
    except PASSED_ON:
        raise
    except Exception:  # noqa: BLE001  # see above
        name, (_, *replies) = closed.content.entries[number].completion_id, closed.content.ids.read(number)
        counts = enumerate(len(reply or b"") // TOKEN_BYTES for reply in replies)
        return tuple(TokenRange(name, index, 0, count, PolicyVersion()) for index, count in counts if count)


def _build(
    closed: ClosedSession, registry: StrategyRegistry[BaseTrajectoryBuilder], incremental: IncrementalBuild | None
) -> Trajectory:
    if incremental is not None:
        return incremental.finish(closed.session)
    builder = registry.create(closed.session.spec.builder)
    if isinstance(builder, ClosedSessionBuilder):
        return builder.build_closed(closed)
    return builder.build(closed.full_session)


def without_traces(closed: ClosedSession, reason: str, error: str) -> Trajectory:
    """Status ERROR, no traces, everything captured excluded with one reason."""
    units = [(reason, captured_units(call.record)) for call in closed.sorted_calls]
    metadata = {"builder": closed.session.spec.builder.strategy, "records": len(closed.calls)}
    return trajectory_of(
        closed.session, excluded=by_reason(units), status=TrajectoryStatus.ERROR, error=error, metadata=metadata
    )


def fit_to_limit(closed: ClosedSession, built: Trajectory, limit: int, header: int) -> tuple[Trajectory, bytes]:
    """``built`` and its bytes; over ``limit`` bytes its traces are left out, then also its output (rule C1).

    ``header`` bytes of the limit are taken by the manifest.
    """
    value = encode(built, MSGPACK)
    size = len(value) + header
    if size <= limit:
        return built, value
    error = f"the trajectory has {size} bytes with its manifest, at most {limit} are sent"
    smaller = without_traces(closed, "too_large", error)
    value = encode(smaller, MSGPACK)
    if len(value) > limit:
        smaller = smaller.model_copy(update={"output": None, "error": f"{error}; its output was left out, too"})
        value = encode(smaller, MSGPACK)
    return smaller, value


def _with_identity(session: CompletionSession, built: object) -> Trajectory:
    """What a builder must not decide is taken from the session: identity, times, output, rewards."""
    if not isinstance(built, Trajectory):
        raise TypeError(f"build() returned {type(built).__name__}, not a Trajectory")
    expected = trajectory_of(session)
    fixed = {"session_id", "attempt", "spec", "opened_at", "closed_at", "output", "reported_reward"}
    ungraded = {"revision": None, "evaluation": None, "ungraded_reason": None}
    traces = tuple(trace.model_copy(update={"reward": None}) for trace in built.traces)
    return built.model_copy(update={name: getattr(expected, name) for name in fixed} | ungraded | {"traces": traces})
