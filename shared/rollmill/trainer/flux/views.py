"""The pipeline's traces converted to Flux's names."""

from __future__ import annotations

from itertools import accumulate

from rollmill import models
from rollmill.errors import InvalidInputError
from rollmill.models import SessionStatus, Trace
from rollmill.trainer.flux.trajectory import Trajectory, TrajectoryStatus
from rollmill.trainer.flux.versions import PolicyVersion, VersionSegment

STATUSES = {
    SessionStatus.COMPLETED: TrajectoryStatus.COMPLETED,
    SessionStatus.TIMEOUT: TrajectoryStatus.TRUNCATED,
    SessionStatus.ERROR: TrajectoryStatus.FAILED,
}


def views_of(trajectory: models.Trajectory) -> list[Trajectory]:
    """A view of each graded trace; a trace without a reward has none."""
    graded = [number for number, trace in enumerate(trajectory.traces) if trace.reward is not None]
    return [view_of(trajectory, number) for number in graded]


def view_of(trajectory: models.Trajectory, number: int = 0) -> Trajectory:
    """Trace ``number`` of a rollout. Its id is ``<session>:<attempt>:<number>``, texts are empty.

    Raises InvalidInputError for a trace without a reward: ungraded is not 0.0.
    """
    trace = trajectory.traces[number]
    if trace.reward is None:
        raise InvalidInputError(f"trace {number} of session {trajectory.session_id} is not graded")
    prompt, response = trace.prompt_ids.tolist(), trace.response_ids.tolist()
    context = [0] * len(prompt)
    return Trajectory(
        id=f"{trajectory.session_id}:{trajectory.attempt}:{number}",
        group_id=trajectory.group_id,
        prompt_tokens=prompt,
        response_tokens=response,
        attention_mask=[1] * (len(prompt) + len(response)),
        loss_mask=context + trace.loss_mask.tolist(),
        behavior_log_probs=_after_prompt(context, trace.response_logprobs),
        reward=trace.reward,
        token_rewards=_after_prompt(context, trace.token_rewards),
        version=PolicyVersion.of(trace.oldest_version or models.PolicyVersion()),
        version_segments=_segments(trace),
        status=_status(trajectory.status, trace),
        metadata={**trajectory.metadata, **trace.metadata},
    )


def _after_prompt(context: list[int], values: models.Values | None) -> list[float]:
    return [] if values is None else [*map(float, context), *values.tolist()]


def _segments(trace: Trace) -> list[VersionSegment]:
    ends = list(accumulate((run.length for run in trace.versions), initial=len(trace.prompt_ids)))
    return [
        VersionSegment(end - run.length, end, PolicyVersion.of(run.version))
        for run, end in zip(trace.versions, ends[1:], strict=True)
        if run.version is not None
    ]


def _status(status: SessionStatus, trace: Trace) -> TrajectoryStatus:
    cut_off = status is SessionStatus.COMPLETED and trace.finish_reason == "length"
    return TrajectoryStatus.TRUNCATED if cut_off else STATUSES[status]
