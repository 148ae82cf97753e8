"""What a webhook is told of a session: its result, without the tokens. Pure."""

from __future__ import annotations

from typing import Any

from rollmill.models import Trajectory

EVENT = "session_result"


def name_of(trajectory: Trajectory) -> str:
    """The same for the same result, however often it is told."""
    return f"{trajectory.session_id}:{trajectory.attempt}:{trajectory.revision or 0}"


def webhook_payload(trajectory: Trajectory) -> dict[str, Any]:
    """Plain values. A revised reward is a notice of its own, with the next ``revision``."""
    spec = trajectory.spec
    return {
        "event": EVENT,
        "id": name_of(trajectory),
        "session_id": trajectory.session_id,
        "attempt": trajectory.attempt,
        "revision": trajectory.revision or 0,
        "status": trajectory.status.value,
        "error": trajectory.error,
        "task_id": spec.task_id,
        "group_id": trajectory.group_id,
        "dataset": spec.dataset,
        "epoch": spec.epoch,
        "purpose": spec.purpose.value,
        "policy": spec.policy,
        "opened_at": trajectory.opened_at,
        "closed_at": trajectory.closed_at,
        "reward": trajectory.outcome_reward,
        "trace_rewards": [trace.reward for trace in trajectory.traces],
        "ungraded_reason": trajectory.ungraded_reason,
        "evaluation": trajectory.evaluation,
        "trained_tokens": trajectory.trained_tokens,
    }
