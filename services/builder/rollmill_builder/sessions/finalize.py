"""A session's end: build, check, fit. Whatever a builder does, a trajectory comes out and the ledger balances."""

from __future__ import annotations

from rollmill.codec import MSGPACK, encode
from rollmill.models import CompletionSession, Trajectory, TrajectoryStatus
from rollmill.strategies import BaseTrajectoryBuilder, StrategyRegistry, trajectory_of
from rollmill_builder.merging.closed_session import CallBuilder, ClosedSession
from rollmill_builder.merging.sampled_calls import by_reason, captured_units
from rollmill_builder.sessions.incremental_builder import Folded, described
from rollmill_builder.sessions.token_accounting import settle


def no_completions(session: CompletionSession, builder: str) -> Trajectory:
    """The trajectory of a session without a single call."""
    metadata = {"builder": builder, "records": 0, "session_status": session.status.value}
    return trajectory_of(session, status=TrajectoryStatus.ERROR, error="no completions", metadata=metadata)


def finish(
    ended: ClosedSession, registry: StrategyRegistry[BaseTrajectoryBuilder], folded: Folded | None = None
) -> Trajectory:
    """The settled trajectory of a session; a failing builder gives status ERROR and excludes all its units.

    ``folded``: what an incremental builder has made of the calls so far.
    """
    name = ended.session.spec.builder.strategy
    if not len(ended.log):
        return no_completions(ended.session, name)
    try:
        built = _identified(ended.session, _built(ended, registry, folded))
        settled = settle(ended, built)
        encode(settled)
    except Exception as error:  # noqa: BLE001  # foreign code may raise anything, and no session may be lost by it
        return without_traces(ended, "builder_error", f"builder {name} failed: {described(error)}")
    return settled


def _built(
    ended: ClosedSession, registry: StrategyRegistry[BaseTrajectoryBuilder], folded: Folded | None
) -> Trajectory:
    if folded is not None:
        return folded.finish(ended.session)
    builder = registry.create(ended.session.spec.builder)
    return builder.build_calls(ended) if isinstance(builder, CallBuilder) else builder.build(ended.whole)


def without_traces(ended: ClosedSession, reason: str, error: str) -> Trajectory:
    """Status ERROR, no traces, everything captured excluded with one reason."""
    units = [(reason, captured_units(item.record)) for item in ended.calls]
    metadata = {"builder": ended.session.spec.builder.strategy, "records": len(ended.log)}
    return trajectory_of(
        ended.session, excluded=by_reason(units), status=TrajectoryStatus.ERROR, error=error, metadata=metadata
    )


def fitting(ended: ClosedSession, built: Trajectory, limit: int, header: int) -> tuple[Trajectory, bytes]:
    """``built`` and its bytes; over ``limit`` bytes its traces, then also its output, give way (rule C1).

    ``header`` bytes of the limit are taken by the manifest.
    """
    value = encode(built, MSGPACK)
    size = len(value) + header
    if size <= limit:
        return built, value
    error = f"the trajectory has {size} bytes with its manifest, at most {limit} are sent"
    smaller = without_traces(ended, "too_large", error)
    value = encode(smaller, MSGPACK)
    if len(value) > limit:
        smaller = smaller.model_copy(update={"output": None, "error": f"{error}; its output was left out, too"})
        value = encode(smaller, MSGPACK)
    return smaller, value


def _identified(session: CompletionSession, built: object) -> Trajectory:
    """What a builder must not decide: identity, times, output, rewards."""
    if not isinstance(built, Trajectory):
        raise TypeError(f"build() returned {type(built).__name__}, not a Trajectory")
    mine = trajectory_of(session)
    fixed = {"session_id", "attempt", "spec", "opened_at", "closed_at", "output", "reported_reward"}
    ungraded = {"revision": None, "evaluation": None, "ungraded_reason": None}
    traces = tuple(trace.model_copy(update={"reward": None}) for trace in built.traces)
    return built.model_copy(update={name: getattr(mine, name) for name in fixed} | ungraded | {"traces": traces})
