"""Fits a rewarded trajectory into the topic's size limit: graders' metadata goes first, tokens never (rule C1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollmill.codec import MSGPACK, encode
from rollmill.models import Trajectory

HEADROOM = 256 * 2**10
"""Bytes that a built trajectory must leave for rewards and the shortest provenance."""


def fit(trajectory: Trajectory, limit: int) -> bytes:
    """MessagePack of ``trajectory``, with as little left out as ``limit`` bytes demand; ``metadata.cut`` names it.

    The result is larger than ``limit`` only where the arrays of the built trajectory alone are.
    """
    packed = encode(trajectory, MSGPACK)
    for name, cut in CUTS.items():
        if len(packed) <= limit:
            break
        trajectory = _with_cut_noted(cut(trajectory), name)
        packed = encode(trajectory, MSGPACK)
    return packed


def _with_cut_noted(trajectory: Trajectory, name: str) -> Trajectory:
    cuts = [*trajectory.metadata.get("cut", ()), name]
    return trajectory.replace(metadata={**trajectory.metadata, "cut": cuts})


def without_grader_metadata(trajectory: Trajectory) -> Trajectory:
    return _entries(trajectory, lambda entry: {**entry, "metadata": {}, "components": None})


def without_texts(trajectory: Trajectory) -> Trajectory:
    bare = {"prompt_messages": None, "response_messages": None, "tools": None}
    return trajectory.replace(traces=tuple(trace.replace(**bare) for trace in trajectory.traces), output=None)


def without_entries(trajectory: Trajectory) -> Trajectory:
    return trajectory.replace(evaluation={**(trajectory.evaluation or {}), "evaluations": []})


def without_token_rewards(trajectory: Trajectory) -> Trajectory:
    """The rewards of traces stay, as if they were given at their ends."""
    return trajectory.replace(traces=tuple(trace.replace(token_rewards=None) for trace in trajectory.traces))


def _entries(trajectory: Trajectory, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Trajectory:
    if trajectory.evaluation is None:
        return trajectory
    entries = [change(entry) for entry in trajectory.evaluation["evaluations"]]
    return trajectory.replace(evaluation={**trajectory.evaluation, "evaluations": entries})


CUTS = {
    "grader_metadata": without_grader_metadata,
    "texts": without_texts,
    "evaluations": without_entries,
    "token_rewards": without_token_rewards,
}
"""Applied in this order until the trajectory fits."""
