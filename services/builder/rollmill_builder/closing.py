"""A session's end: build, check, fit. Whatever a builder does, a trajectory comes out and the ledger balances."""

from __future__ import annotations

import re

from rollmill.codec import MSGPACK, encode
from rollmill.models import CompletionSession, Trajectory, TrajectoryStatus
from rollmill.strategies import BaseTrajectoryBuilder, StrategyRegistry, trajectory_of
from rollmill_builder.accounting import settle
from rollmill_builder.calls import by_reason, captured_units

MAX_ERROR = 2000
"""Characters of a foreign error that are kept."""


def no_completions(session: CompletionSession, builder: str) -> Trajectory:
    """The trajectory of a session without a single call."""
    metadata = {"builder": builder, "records": 0, "session_status": session.status.value}
    return trajectory_of(session, status=TrajectoryStatus.ERROR, error="no completions", metadata=metadata)


def finish(session: CompletionSession, registry: StrategyRegistry[BaseTrajectoryBuilder]) -> Trajectory:
    """The settled trajectory of ``session``; a failing builder gives status ERROR and excludes all its units."""
    name = session.spec.builder.strategy
    if not session.completions:
        return no_completions(session, name)
    try:
        built = _identified(session, registry.create(session.spec.builder).build(session))
        settled = settle(session, built)
        encode(settled)
    except Exception as error:  # noqa: BLE001  # foreign code may raise anything, and no session may be lost by it
        return without_traces(session, "builder_error", f"builder {name} failed: {_described(error)}")
    return settled


def without_traces(session: CompletionSession, reason: str, error: str) -> Trajectory:
    """Status ERROR, no traces, everything captured excluded with one reason."""
    units = [(reason, captured_units(record)) for record in session.completions]
    metadata = {"builder": session.spec.builder.strategy, "records": len(session.completions)}
    return trajectory_of(
        session, excluded=by_reason(units), status=TrajectoryStatus.ERROR, error=error, metadata=metadata
    )


def fitting(session: CompletionSession, built: Trajectory, limit: int, header: int) -> tuple[Trajectory, bytes]:
    """``built`` and its bytes; over ``limit`` bytes its traces, then also its output, give way (RULES C1).

    ``header`` bytes of the limit are taken by the manifest.
    """
    value = encode(built, MSGPACK)
    size = len(value) + header
    if size <= limit:
        return built, value
    error = f"the trajectory has {size} bytes with its manifest, at most {limit} are sent"
    smaller = without_traces(session, "too_large", error)
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


def _described(error: Exception) -> str:
    """Type and text of an error, without memory addresses: the same session gives the same bytes (RULES E3)."""
    return re.sub(r"0x[0-9a-fA-F]+", "0x", f"{type(error).__name__}: {error}")[:MAX_ERROR]
