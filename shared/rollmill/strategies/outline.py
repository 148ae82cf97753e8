"""A trajectory's identity, as every builder has to fill it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollmill.models import CompletionSession, ExcludedUnits, Trace, Trajectory, TrajectoryStatus


def trajectory_of(
    session: CompletionSession,
    traces: Iterable[Trace] = (),
    *,
    excluded: Iterable[ExcludedUnits] = (),
    status: TrajectoryStatus | None = None,
    error: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Trajectory:
    """The trajectory of ``session`` with these traces; ``status`` and ``error`` default to the session's own."""
    return Trajectory(
        session_id=session.session_id,
        attempt=session.attempt,
        status=status or session.status,
        spec=session.spec,
        opened_at=session.opened_at,
        closed_at=session.closed_at,
        error=session.error if error is None else error,
        output=session.output,
        reported_reward=session.reward,
        traces=tuple(traces),
        excluded=tuple(excluded),
        metadata=dict(metadata or {}),
    )
