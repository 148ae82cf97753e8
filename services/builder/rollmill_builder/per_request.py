"""``per_request``: every call is a trace of its own."""

from __future__ import annotations

from rollmill.models import CompletionSession, Trajectory
from rollmill.strategies import BaseTrajectoryBuilder, trajectory_of
from rollmill_builder.branches import Branch
from rollmill_builder.calls import by_reason, calls_of, refused_units
from rollmill_builder.closing import no_completions
from rollmill_builder.prefix_merging import statistics, traces_of, untrained_units


class PerRequestBuilder(BaseTrajectoryBuilder):
    """One trace per sampled reply: its prompt as served, its tokens with mask 1. Takes no config."""

    def build(self, session: CompletionSession) -> Trajectory:
        if not session.completions:
            return no_completions(session, "per_request")
        branches = tuple(Branch((call,)) for call in calls_of(session))
        traces = traces_of(branches)
        return trajectory_of(
            session,
            traces,
            excluded=by_reason([*refused_units(session), *untrained_units(branches)]),
            metadata={"builder": "per_request", **statistics(session, traces)},
        )
