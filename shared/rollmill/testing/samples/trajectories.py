"""Trajectories made by hand, as the reward-merger would write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollmill.models import (
    PolicyVersion,
    Purpose,
    SessionSpec,
    Trace,
    TraceTurn,
    Trajectory,
    TrajectoryStatus,
    VersionRun,
    VersionRuns,
)

FIRST = PolicyVersion()


@dataclass(frozen=True)
class Reply:
    """One sampled reply: its ids, its policy version, and the context tokens that follow it."""

    ids: tuple[int, ...] = (5, 6, 7)
    version: PolicyVersion = FIRST
    then: tuple[int, ...] = ()

    @property
    def runs(self) -> VersionRuns:
        runs = (VersionRun(self.version, len(self.ids)),)
        return (*runs, VersionRun(None, len(self.then))) if self.then else runs


def sample_trace(
    session_id: str,
    replies: Sequence[Reply] = (Reply(),),
    *,
    prompt: Sequence[int] = (1, 2),
    index: int = 0,
    **fields: Any,
) -> Trace:
    """A trace of ``replies``, all trained; the log-prob of the token with id n is -n / 64, temperature 1."""
    turns: list[TraceTurn] = []
    mask: list[int] = []
    ids: list[int] = []
    for number, reply in enumerate(replies):
        start = len(ids)
        ids += [*reply.ids, *reply.then]
        mask += [1] * len(reply.ids) + [0] * len(reply.then)
        name = f"call-{session_id}-{index}-{number}"
        turns.append(TraceTurn(completion_id=name, start=start, stop=start + len(reply.ids), temperature=1.0))
    values: dict[str, Any] = {
        "prompt_ids": np.array(prompt, np.int32),
        "response_ids": np.array(ids, np.int32),
        "loss_mask": np.array(mask, np.uint8),
        "response_logprobs": np.array(ids, np.float32) / np.float32(-64) * np.array(mask, np.float32),
        "versions": tuple(run for reply in replies for run in reply.runs),
        "turns": tuple(turns),
        "finish_reason": "stop",
    }
    return Trace.model_validate({**values, **fields})


def sample_trajectory(
    session_id: str,
    reward: float | None = 1.0,
    *,
    group: str | None = "g",
    size: int = 2,
    version: PolicyVersion = FIRST,
    traces: Sequence[Trace] | None = None,
    purpose: Purpose = Purpose.TRAIN,
    policy: str = "policy",
    **fields: Any,
) -> Trajectory:
    """A completed session of a group of ``size`` with one trace, rewarded; None is ungraded. Ended at 100 s."""
    given = traces if traces is not None else (sample_trace(session_id, (Reply(version=version),)),)
    rewarded = [
        trace if trace.reward is not None or reward is None else trace.replace(reward=reward) for trace in given
    ]
    values: dict[str, Any] = {
        "status": TrajectoryStatus.COMPLETED,
        "spec": SessionSpec(group_id=group, group_size=size, purpose=purpose, policy=policy),
        "opened_at": 50.0,
        "closed_at": 100.0,
        "revision": 0,
        "traces": tuple(rewarded),
        "evaluation": {"outcome_reward": reward},
        "ungraded_reason": "deadline" if reward is None else None,
    }
    return Trajectory.model_validate({"session_id": session_id, **values, **fields})
